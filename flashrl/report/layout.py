"""What a page consists of, and how it is laid out for a few runs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from flashrl.report.drawing import Panel
from flashrl.report.figures import draw_panels
from flashrl.report.records import Run
from flashrl.report.summary import summarize_run
from flashrl.report.table import Heading, Table, describe_set_up, tabulate

__all__ = ["Layout", "Section", "lay_out_runs"]

_SECTIONS = {
    "reward": ("What was learned", ""),
    "mismatch": (
        "What 8 bit cost, and what the correction did",
        "The rollout engine samples from its own distribution μ, the trainer works on its policy "
        "π. The importance ratio π/μ of each sampled token measures the gap; truncated importance "
        "sampling weights the token by it, up to a bound.",
    ),
    "tokens": ("Token by token", ""),
    "time": ("Where the time went", ""),
}
"""Title and introduction of the page's parts, by the ``section`` of their panels."""


@attrs.frozen(kw_only=True)
class Section:
    """A part of the page.

    Args:
        key: How its figures are laid out; a class of the style sheet.
        title: Above it.
        text: Below that.
        tables: Before the figures.
        legend: What colours stand for in all of them.
        panels: The figures.
    """

    key: str
    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    legend: Sequence[Heading] = ()
    panels: Sequence[Panel] = ()


@attrs.frozen(kw_only=True)
class Layout:
    """A page, but for its heading and its findings.

    Args:
        sections: In reading order.
        set_up: What the runs shared, as label and value.
    """

    sections: Sequence[Section]
    set_up: Sequence[tuple[str, str]]


def lay_out_runs(runs: Sequence[Run]) -> Layout:
    """Numbers side by side, then every figure that the runs have numbers for."""
    panels = draw_panels(runs)
    table = tabulate([summarize_run(run) for run in runs])
    sections = [Section(key="numbers", title="The numbers", tables=[table])]
    sections += [
        Section(key=key, title=title, text=text, panels=chosen)
        for key, (title, text) in _SECTIONS.items()
        if (chosen := [panel for panel in panels if panel.section == key])
    ]
    return Layout(sections=sections, set_up=describe_set_up(runs))
