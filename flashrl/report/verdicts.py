"""What an experiment's report says: its tables, and sentences made from the numbers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from flashrl.report.comparison import ALPHA, Comparison, Test
from flashrl.report.findings import show_small
from flashrl.report.groups import Group
from flashrl.report.records import Run
from flashrl.report.significance import Interval
from flashrl.report.table import MISSING, Heading, Table
from flashrl.report.timing import mean_parts

__all__ = ["find_in_experiment", "tabulate_condition", "tabulate_corrections"]

_NOTE = (
    "Final: mean over the last quarter of the training, with the 95 % interval of the mean over "
    "seeds. Differences are paired by seed, with their 95 % interval; p is the paired t-test's, "
    "corrected by Holm for all {num} tests of this page. The rest are means over all steps."
)


def find_in_experiment(runs: Sequence[Run], comparison: Comparison) -> list[dict[str, str]]:
    """Findings for people.

    Args:
        runs: All of them.
        comparison: What :func:`flashrl.report.comparison.compare_groups` made of them.

    Returns:
        ``headline`` and ``text`` of each.
    """
    findings = [
        *_progress(runs),
        *_against_roots(comparison),
        *_against_others(comparison),
        *_caution(comparison),
    ]
    return [{"headline": headline, "text": text} for headline, text in findings]


def tabulate_condition(comparison: Comparison, condition: str, *, explain: bool) -> Table:
    """A row for each arm under a condition; if asked to, with what the numbers are."""
    roots = comparison.roots(condition)
    root = roots[0] if roots else None
    less = [] if root is None else [f"less {root.title}", "p"]
    rest = ["KL, nats", "effective sample", "bounded, dropped", "s a step", "tokens a s"]
    rows = []
    for outcome in comparison.of_condition(condition):
        group = outcome.group
        test = None if root is None else comparison.find_test(group, root.arm)
        tested = [] if root is None else [_show_difference(test), _show_p(test)]
        cells = [_show_seeds(group), _show_final(outcome.final), *tested, *_show_rest(group)]
        rows.append((Heading(group.title, group.index), cells))
    return Table(
        columns=[Heading(name) for name in ("seeds", f"final {comparison.metric}", *less, *rest)],
        rows=rows,
        note=_NOTE.format(num=len(comparison.tests)) if explain else "",
    )


def tabulate_corrections(comparison: Comparison) -> Table | None:
    """A row for each test between two arms that have both a baseline; None without one."""
    tests = [test for test in comparison.tests if test.baseline.baselines]
    if not tests:
        return None
    return Table(
        columns=[Heading(name) for name in ("condition", "against", "difference", "p")],
        rows=[
            (
                Heading(test.group.title, test.group.index),
                [
                    test.group.condition_title,
                    test.baseline.title,
                    _show_difference(test),
                    _show_p(test),
                ],
            )
            for test in tests
        ],
        note="Positive is better than without. Paired and corrected as in the tables above.",
    )


def _progress(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    done = sum(run.complete for run in runs)
    if done < len(runs):
        status = Counter(run.status for run in runs if not run.complete)
        counted = ", ".join(f"{number} {name}" for name, number in sorted(status.items()))
        yield (
            f"This report is partial: {done} of {len(runs)} runs are finished.",
            f"The others ({counted}) are in the curves up to where they came, in no table and in "
            "no test.",
        )


def _against_roots(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """For each condition: which arms end below or above what all are compared with."""
    for condition in dict.fromkeys(group.condition for group in comparison.groups):
        for root in comparison.roots(condition):
            tests = [
                test
                for test in comparison.tests
                if test.group.condition == condition and test.baseline is root
            ]
            if any(math.isfinite(test.difference.half_width) for test in tests):
                verdict, text = _judge(tests, root.title)
                yield f"{root.condition_title}: {verdict}", text


def _judge(tests: Sequence[Test], root: str) -> tuple[str, str]:
    sure = [test for test in tests if test.decided]
    if not sure:
        worst = min(tests, key=_largest_loss)
        room = -_largest_loss(worst)
        return (
            f"no arm was shown to end elsewhere than {root}.",
            f"The intervals leave room for a loss of up to {room:.3f} ({worst.group.title}, "
            f"{worst.difference.num} seeds)."
            if room > 0
            else "The intervals leave no room for a loss.",
        )
    sides = {
        "below": [test for test in sure if test.difference.mean < 0],
        "above": [test for test in sure if test.difference.mean > 0],
    }
    verdicts = [
        f"{_enumerate([test.group.title for test in chosen])} ended {side} {root}"
        for side, chosen in sides.items()
        if chosen
    ]
    text = "; ".join(f"{test.group.title} by {_show_difference(test)}" for test in sure) + "."
    others = len(tests) - len(sure)
    return "; ".join(verdicts) + ".", text + (f" The other {others}: not shown." if others else "")


def _largest_loss(test: Test) -> float:
    """The lower end of the interval; of a single pair there is none, and it bounds nothing."""
    return test.difference.low if math.isfinite(test.difference.half_width) else math.inf


def _against_others(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Whether a correction or a profile changed anything."""
    tests = [test for test in comparison.tests if test.baseline.baselines]
    sure = [test for test in tests if test.decided]
    if sure:
        yield (
            f"What was done about 8 bit changed the outcome in {len(sure)} of {len(tests)} "
            "comparisons.",
            "; ".join(f"{test.group.condition_title}: {_say(test)}" for test in sure) + ".",
        )
    elif tests:
        yield (
            "What was done about 8 bit was not shown to change any outcome.",
            f"Of {len(tests)} comparisons with the same rollouts left alone, none came out beyond "
            "chance.",
        )


def _caution(comparison: Comparison) -> Iterator[tuple[str, str]]:
    if comparison.tests:
        yield (
            "What this does not show.",
            f"A difference that was not shown is not one that is excluded: its interval says what "
            f"is. All {len(comparison.tests)} tests together call something a difference that is "
            f"none with a chance of at most {ALPHA:.0%}. And it is this model and this task.",
        )


def _say(test: Test) -> str:
    return f"{test.group.title} {_show_difference(test)} against {test.baseline.title}"


def _enumerate(names: Sequence[str]) -> str:
    *most, last = [name.replace(", ", " ") for name in names]
    return f"{', '.join(most)} and {last}" if most else last


def _show_seeds(group: Group) -> str:
    done = sum(run.complete for run in group.runs)
    return str(done) if done == len(group.runs) else f"{done} of {len(group.runs)}"


def _show_final(final: Interval | None) -> str:
    return MISSING if final is None else f"{final.mean:.3f}{_show_width(final)}"


def _show_difference(test: Test | None) -> str:
    if test is None:
        return MISSING
    signed = f"{test.difference.mean:+.3f}".replace("-", "\N{MINUS SIGN}")
    return f"{signed}{_show_width(test.difference)}"


def _show_width(interval: Interval) -> str:
    return f" ± {interval.half_width:.3f}" if math.isfinite(interval.half_width) else ""


def _show_p(test: Test | None) -> str:
    if test is None or test.adjusted_p is None:
        return MISSING
    return "< 0.001" if test.adjusted_p < 0.001 else f"{test.adjusted_p:.3f}"


def _show_rest(group: Group) -> list[str]:
    """What it cost and what it brought, over all seeds and steps."""
    kl, ess = group.mean("flashrl/kl"), group.mean("flashrl/ess")
    bounded = [group.mean(f"flashrl/frac_{name}") for name in ("truncated", "dropped")]
    known = [value for value in bounded if value is not None]
    seconds = mean_parts(group.runs).get("total")
    speed = group.mean("tokens_per_second")
    return [
        MISSING if kl is None else show_small(kl),
        MISSING if ess is None else f"{ess:.1%}",
        f"{sum(known):.2%}" if known else MISSING,
        MISSING if seconds is None else f"{seconds:.2f}",
        MISSING if speed is None else f"{speed:,.0f}",
    ]
