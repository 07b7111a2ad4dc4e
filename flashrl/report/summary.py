"""What a report says in numbers, computed from the records and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from flashrl.report.findings import find, last_quarter
from flashrl.report.groups import is_experiment
from flashrl.report.records import Run
from flashrl.report.timing import mean_seconds

__all__ = ["summarize", "summarize_run"]

_MEANS = {
    "kl": "flashrl/kl",
    "ess": "flashrl/ess",
    "ratio_sd": "flashrl/ratio_sd",
    "ratio_p95": "flashrl/ratio_p95",
    "frac_truncated": "flashrl/frac_truncated",
}


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """The numbers of all runs, and the sentences that they allow.

    Args:
        runs: As read from disk.

    Returns:
        Plain values: ``runs``, one mapping a run, and ``findings``, each a headline and a text; of
        an experiment with arms and seeds also ``comparison``.

    Raises:
        MissingDependencyError: It is an experiment, and SciPy is not installed.
    """
    summaries = [summarize_run(run) for run in runs]
    if is_experiment(runs):
        from flashrl.report.comparison import compare_groups  # they need SciPy
        from flashrl.report.verdicts import find_in_experiment

        comparison = compare_groups(runs)
        return {
            "runs": summaries,
            "findings": find_in_experiment(runs, comparison),
            "comparison": comparison.to_data(),
        }
    return {"runs": summaries, "findings": find(runs, summaries)}


def summarize_run(run: Run) -> dict[str, Any]:
    """One run's numbers; None stands for what was not recorded.

    Mismatch is a mean over steps, ``ratio_max`` the largest of all; ``reward_start`` and
    ``reward_end`` are means over the first and the last quarter of the steps done.
    """
    rewards = run.values("reward")
    last = last_quarter(rewards)
    largest = run.values("flashrl/ratio_max")
    return {
        "name": run.name,
        "title": run.title,
        "scheme": run.facts.get("scheme"),
        "correction": run.facts.get("correction"),
        "status": run.status,
        "steps_done": len(run.steps),
        "steps_planned": run.facts.get("num_steps"),
        "reward_start": _mean(rewards[: len(last)]),
        "reward_end": _mean(last),
        "reward_best": run.facts.get("best_reward"),
        **{name: _mean(run.values(metric)) for name, metric in _MEANS.items()},
        "ratio_max": max(largest) if largest else None,
        "seconds_per_step": mean_seconds(run),
        "seconds": run.end.get("seconds"),
        "cpu_share": _cpu_share(run),
        "peak_rss_bytes": run.end.get("peak_rss_bytes"),
        "verified_tensors": run.end.get("verified_tensors"),
    }


def _cpu_share(run: Run) -> float | None:
    """What the run got of the CPU time that its threads could have used."""
    seconds, cpu_seconds = run.end.get("seconds"), run.end.get("cpu_seconds")
    if not seconds or cpu_seconds is None:
        return None
    return float(cpu_seconds / (seconds * run.facts.get("num_threads", 1)))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
