"""The report's tables: of a few runs, with a row a number and a column a run; and in general."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from flashrl.report.findings import show_small
from flashrl.report.records import Run

__all__ = ["MISSING", "Heading", "Table", "describe_set_up", "tabulate"]

MISSING = "—"
"""What stands for a number that was not recorded."""


@attrs.frozen
class Heading:
    """Of a column or a row.

    Args:
        text: What it says.
        color: Index of the run or arm whose colour it shows; None without one.
    """

    text: str
    color: int | None = None


@attrs.frozen(kw_only=True)
class Table:
    """Text in rows and columns.

    Args:
        columns: Above the cells.
        rows: A heading and the cells of each.
        note: What to know of it.
        corner: Above the headings of the rows.
    """

    columns: Sequence[Heading]
    rows: Sequence[tuple[Heading, Sequence[str]]]
    note: str = ""
    corner: str = ""


def _number(pattern: str) -> Callable[[Any], str]:
    return lambda value: pattern.format(value)


_ROWS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("reward, first quarter", "reward_start", _number("{:.2f}")),
    ("reward, last quarter", "reward_end", _number("{:.2f}")),
    ("KL, nats a token", "kl", show_small),
    ("effective sample size", "ess", _number("{:.1%}")),
    ("ratio, standard deviation", "ratio_sd", show_small),
    ("ratio, 95th percentile", "ratio_p95", _number("{:.2f}")),
    ("ratio, largest of all", "ratio_max", _number("{:.2f}")),
    ("weights truncated", "frac_truncated", _number("{:.1%}")),
    ("seconds a step", "seconds_per_step", lambda parts: f"{parts['total']:.1f}"),
    ("minutes in all", "seconds", lambda seconds: f"{seconds / 60:.1f}"),
    ("peak memory, GB", "peak_rss_bytes", lambda size: f"{size / 1e9:.1f}"),
)


def tabulate(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """A row a number and a column a run; rows that no run has a number for are left out.

    Args:
        summaries: What :func:`flashrl.report.summary.summarize_run` gave for each run.
    """
    rows = [("steps", [_steps(summary) for summary in summaries])]
    for label, key, show in _ROWS:
        if any(summary[key] not in (None, {}) for summary in summaries):
            cells = [_cell(summary[key], show) for summary in summaries]
            rows.append((label, cells))
    return Table(
        columns=[Heading(summary["title"], index) for index, summary in enumerate(summaries)],
        rows=[(Heading(label), cells) for label, cells in rows],
        note="Mismatch is a mean over the steps, unless it says otherwise.",
    )


def describe_set_up(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What the runs shared, as label and value."""
    facts = runs[0].facts
    named = [
        ("model", facts.get("model")),
        ("completions a step", facts.get("completions_per_step")),
        ("learning rate", facts.get("learning_rate")),
        ("seed", facts.get("seed")),
        ("CPU threads", facts.get("num_threads")),
        *facts.get("versions", {}).items(),
    ]
    return [(label, str(value)) for label, value in named if value is not None]


def _steps(summary: Mapping[str, Any]) -> str:
    done, planned = summary["steps_done"], summary["steps_planned"]
    return str(done) if planned in (None, done) else f"{done} of {planned}"


def _cell(value: Any, show: Callable[[Any], str]) -> str:
    return MISSING if value in (None, {}) else show(value)
