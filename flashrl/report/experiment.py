"""How the page is laid out for an experiment: arms, conditions and seeds."""

from __future__ import annotations

from collections.abc import Sequence

from flashrl.report.bands import draw_condition, draw_differences
from flashrl.report.comparison import compare_groups
from flashrl.report.layout import Layout, Section
from flashrl.report.records import Run
from flashrl.report.table import Heading, describe_set_up
from flashrl.report.verdicts import tabulate_condition, tabulate_corrections

__all__ = ["lay_out_experiment"]

_VARIED = ("seed", "learning rate", "completions a step")


def lay_out_experiment(runs: Sequence[Run]) -> Layout:
    """How the arms ended, then condition by condition how they came there."""
    comparison = compare_groups(runs)
    groups = comparison.groups
    titles = {group.index: group.title for group in groups}
    legend = [Heading(title, index) for index, title in sorted(titles.items())]
    sections, explained = [], False
    differences = draw_differences(comparison)
    if differences:
        sections.append(Section(key="differences", title="How they ended", panels=differences))
    for condition in dict.fromkeys(group.condition for group in groups):
        chosen = [group for group in groups if group.condition == condition]
        sections.append(
            Section(
                key="condition",
                title=chosen[0].condition_title,
                text=_describe(chosen[0].runs[0]),
                tables=[tabulate_condition(comparison, condition, explain=not explained)],
                legend=legend,
                panels=draw_condition(chosen),
            )
        )
        explained = True
    corrections = tabulate_corrections(comparison)
    if corrections is not None:
        sections.append(
            Section(
                key="corrections",
                title="What corrections and profiles changed",
                text="Each against the same 8-bit rollouts without it.",
                tables=[corrections],
            )
        )
    set_up = [item for item in describe_set_up(runs) if item[0] not in _VARIED]
    return Layout(sections=sections, set_up=set_up)


def _describe(run: Run) -> str:
    """What is special about a condition, from the facts of one of its runs."""
    facts = run.facts
    named = (
        ("num_steps", "{} optimizer steps"),
        ("completions_per_step", "{} completions a step"),
        ("mini_batches", "{} steps a rollout"),
        ("lag", "rollouts {} versions old"),
        ("max_tokens", "at most {:,} tokens an answer"),
        ("learning_rate", "learning rate {:g}"),
        ("held_out", "{} held-out problems"),
    )
    usual = {"mini_batches": 1, "lag": 0}
    parts = [
        pattern.format(facts[name])
        for name, pattern in named
        if facts.get(name) not in (None, usual.get(name))
    ]
    seeds = "In the curves a line is the mean over the seeds, a band the lowest to the highest."
    return f"{', '.join(parts)}. {seeds}" if parts else seeds
