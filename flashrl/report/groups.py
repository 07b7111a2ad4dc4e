"""Runs of an experiment: the same arm under the same condition, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

from flashrl.report.records import Run

__all__ = ["FINAL", "Group", "choose_outcome", "group_runs", "is_experiment"]

FINAL = 0.25
"""The share of a run's steps, at its end, over which its outcome is taken."""

_NEEDED = ("arm", "condition", "seed")


@attrs.frozen(kw_only=True)
class Group:
    """The runs of one arm under one condition.

    Args:
        arm: The arm's name.
        title: What people call it.
        index: Of the arm among all of the experiment; its colour.
        baselines: Arms it is to be compared with; none for what the others are compared with.
        condition: The condition's name.
        condition_title: What people call it.
        runs: By seed, unfinished ones too.
    """

    arm: str
    title: str
    index: int
    baselines: tuple[str, ...]
    condition: str
    condition_title: str
    runs: tuple[Run, ...]

    def outcomes(self, metric: str) -> dict[int, float]:
        """Seed → mean of a metric over the last quarter of the steps; of finished runs only."""
        found = {}
        for run in self.runs:
            steps, values = run.series(metric)
            begin = (1 - FINAL) * max(steps, default=0)
            last = [value for step, value in zip(steps, values, strict=True) if step > begin]
            if run.complete and last:
                found[int(run.facts["seed"])] = statistics.fmean(last)
        return found

    def mean(self, metric: str) -> float | None:
        """Of a metric over all steps of all runs; None if it was not recorded."""
        values = [value for run in self.runs for value in run.values(metric)]
        return statistics.fmean(values) if values else None


def is_experiment(runs: Sequence[Run]) -> bool:
    """Whether every run says which arm, condition and seed it is."""
    return all(name in run.facts for run in runs for name in _NEEDED)


def choose_outcome(runs: Sequence[Run]) -> str:
    """What the arms are judged by: held-out accuracy, or else reward."""
    return "accuracy" if any(run.values("accuracy") for run in runs) else "reward"


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The groups of an experiment.

    Args:
        runs: Each of which says its arm, condition and seed.

    Returns:
        The groups, condition by condition in the order of the runs; in each, what others are
        compared with comes first, and then the arms by name.
    """
    conditions = list(dict.fromkeys(str(run.facts["condition"]) for run in runs))
    baselines = {str(run.facts["arm"]): _baselines(run) for run in runs}
    arms = sorted(baselines, key=lambda arm: (bool(baselines[arm]), arm))
    groups = []
    for condition in conditions:
        for index, arm in enumerate(arms):
            found = [
                run
                for run in runs
                if (run.facts["condition"], run.facts["arm"]) == (condition, arm)
            ]
            if found:
                facts = found[0].facts
                groups.append(
                    Group(
                        arm=arm,
                        title=str(facts.get("arm_title", arm)),
                        index=index,
                        baselines=baselines[arm],
                        condition=condition,
                        condition_title=str(facts.get("condition_title", condition)),
                        runs=tuple(sorted(found, key=lambda run: int(run.facts["seed"]))),
                    )
                )
    return groups


def _baselines(run: Run) -> tuple[str, ...]:
    return tuple(map(str, run.facts.get("baselines", ())))
