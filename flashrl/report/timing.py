"""Where the time of a step goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from flashrl.report.records import Run

__all__ = ["mean_parts", "mean_seconds"]

_PARTS = {
    "generate": "flashrl/generate_ms",
    "sync": "flashrl/update_ms",
    "score": "flashrl/score_ms",
}
"""Parts of a step, and the metric that times each, in milliseconds; the rest is ``train``."""


def mean_seconds(run: Run) -> dict[str, float]:
    """Mean seconds of a step and of its parts; empty without a recorded step.

    A part that not every step has, such as a rollout that several steps share, counts for all.
    """
    seconds = run.values("seconds") or run.values("step_time")
    if not seconds:
        return {}
    total = statistics.fmean(seconds)
    parts = {
        part: sum(run.values(metric)) / (1000 * len(seconds)) for part, metric in _PARTS.items()
    }
    return {**parts, "train": max(0.0, total - sum(parts.values())), "total": total}


def mean_parts(runs: Sequence[Run]) -> dict[str, float]:
    """The mean over several runs of what :func:`mean_seconds` says; empty if none says anything."""
    timed = [parts for run in runs if (parts := mean_seconds(run))]
    names = timed[0] if timed else ()
    return {name: statistics.fmean(parts[name] for parts in timed) for name in names}
