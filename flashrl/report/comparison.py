"""An experiment in numbers: how each arm ends, and whether that differs from where others do.

Runs are paired by seed, for the same seed draws the same problems.  All tests of an experiment are
one family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from flashrl.report.groups import Group, choose_outcome, group_runs
from flashrl.report.records import Run
from flashrl.report.significance import (
    Difference,
    Interval,
    adjust_by_holm,
    compare_pairs,
    estimate_mean,
)
from flashrl.report.timing import mean_parts

__all__ = ["ALPHA", "Comparison", "Outcome", "Test", "compare_groups"]

ALPHA = 0.05
"""The chance, over all tests of an experiment, of calling something a difference that is none."""

_MISMATCH = ("kl", "ess", "ratio_sd", "frac_truncated", "frac_dropped")


@attrs.frozen(kw_only=True)
class Outcome:
    """How the finished runs of a group ended.

    Args:
        group: Which runs.
        final: Their mean over the seeds; None if none is finished.
    """

    group: Group
    final: Interval | None


@attrs.frozen(kw_only=True)
class Test:
    """An arm against another under the same condition, by the seeds that both have finished.

    Args:
        group: The arm.
        baseline: The other.
        difference: The arm's outcome less the other's.
        adjusted_p: Holm's, over all tests of the experiment; None where there is no p.
    """

    __test__ = False  # no test of pytest's

    group: Group
    baseline: Group
    difference: Difference
    adjusted_p: float | None

    @property
    def decided(self) -> bool:
        """Whether chance is no explanation."""
        return self.adjusted_p is not None and self.adjusted_p < ALPHA


@attrs.frozen(kw_only=True)
class Comparison:
    """What came out of an experiment.

    Args:
        metric: What the arms are judged by.
        outcomes: One for each group.
        tests: One for each group and each of its baselines that shares a finished seed with it.
    """

    metric: str
    outcomes: tuple[Outcome, ...]
    tests: tuple[Test, ...]

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order to show them."""
        return [outcome.group for outcome in self.outcomes]

    def of_condition(self, condition: str) -> list[Outcome]:
        """The outcomes under one condition."""
        return [outcome for outcome in self.outcomes if outcome.group.condition == condition]

    def roots(self, condition: str) -> list[Group]:
        """What the others are compared with in the end: the arms without a baseline."""
        return [o.group for o in self.of_condition(condition) if not o.group.baselines]

    def find_test(self, group: Group, baseline: str) -> Test | None:
        """The test of a group against an arm."""
        for test in self.tests:
            if test.group is group and test.baseline.arm == baseline:
                return test
        return None

    def to_data(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "metric": self.metric,
            "outcomes": [_outcome_data(outcome) for outcome in self.outcomes],
            "tests": [_test_data(test) for test in self.tests],
        }


def compare_groups(runs: Sequence[Run]) -> Comparison:
    """Compare the arms of an experiment.

    Args:
        runs: Each of which says its arm, condition and seed; unfinished ones do not count here.
    """
    metric, groups = choose_outcome(runs), group_runs(runs)
    finals = [group.outcomes(metric) for group in groups]
    outcomes = [
        Outcome(group=group, final=estimate_mean(list(final.values())) if final else None)
        for group, final in zip(groups, finals, strict=True)
    ]
    places = {(group.condition, group.arm): place for place, group in enumerate(groups)}
    tests = []
    for group, final in zip(groups, finals, strict=True):
        for arm in group.baselines:
            place = places.get((group.condition, arm))
            seeds = [] if place is None else sorted(final.keys() & finals[place].keys())
            if place is not None and seeds:
                difference = compare_pairs(
                    [final[seed] for seed in seeds], [finals[place][seed] for seed in seeds]
                )
                baseline = groups[place]
                tests.append(
                    Test(group=group, baseline=baseline, difference=difference, adjusted_p=None)
                )
    return Comparison(metric=metric, outcomes=tuple(outcomes), tests=_adjusted(tests))


def _adjusted(tests: Sequence[Test]) -> tuple[Test, ...]:
    known = [test.difference.p for test in tests if test.difference.p is not None]
    adjusted = iter(adjust_by_holm(known))
    return tuple(
        test if test.difference.p is None else attrs.evolve(test, adjusted_p=next(adjusted))
        for test in tests
    )


def _outcome_data(outcome: Outcome) -> dict[str, Any]:
    group = outcome.group
    return {
        "condition": group.condition,
        "arm": group.arm,
        "title": group.title,
        "seeds": [run.facts["seed"] for run in group.runs],
        "status": [run.status for run in group.runs],
        "final": None if outcome.final is None else _interval_data(outcome.final),
        **{name: group.mean(f"flashrl/{name}") for name in _MISMATCH},
        "response_length": group.mean("completions/mean_length"),
        "tokens_per_second": group.mean("tokens_per_second"),
        "seconds_per_step": mean_parts(group.runs),
    }


def _test_data(test: Test) -> dict[str, Any]:
    return {
        "condition": test.group.condition,
        "arm": test.group.arm,
        "baseline": test.baseline.arm,
        "difference": _interval_data(test.difference),
        "p": test.difference.p,
        "adjusted_p": test.adjusted_p,
    }


def _interval_data(interval: Interval) -> dict[str, Any]:
    known = interval.num > 1  # JSON has no infinity
    return {
        "mean": interval.mean,
        "low": interval.low if known else None,
        "high": interval.high if known else None,
        "num": interval.num,
    }
