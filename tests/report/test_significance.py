"""Intervals, paired tests and Holm's correction, against SciPy's own and numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

stats: Any = pytest.importorskip("scipy.stats")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flashrl.report.significance import (  # noqa: E402
    adjust_by_holm,
    compare_pairs,
    estimate_mean,
)

INT8 = [0.81, 0.79, 0.84, 0.80, 0.77, 0.83, 0.82, 0.78]
BF16 = [0.83, 0.80, 0.85, 0.84, 0.80, 0.83, 0.86, 0.79]
PROBABILITIES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_interval_of_the_mean_by_hand() -> None:
    """2, 4, 6: s = 2, t with 2 degrees of freedom at 97.5 % is 4.3027 (any printed table)."""
    interval = estimate_mean([2.0, 4.0, 6.0])
    assert (interval.mean, interval.num) == (4.0, 3)
    assert interval.half_width == pytest.approx(4.3027 * 2 / math.sqrt(3), abs=1e-3)
    assert interval.low == pytest.approx(4 - interval.half_width)


def test_interval_is_the_one_sample_tests_own() -> None:
    expected = stats.ttest_1samp(INT8, 0).confidence_interval(0.95)
    interval = estimate_mean(INT8)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_one_value_bounds_nothing() -> None:
    assert estimate_mean([0.5]).half_width == math.inf
    assert compare_pairs([0.5], [0.4]).p is None


def test_pairs_by_hand() -> None:
    """Differences of 1, 2, 3, 4, 5: t = 3 / (1.5811 / √5) = 4.243, p = 0.0132 with 4 degrees."""
    difference = compare_pairs([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert difference.mean == 3.0
    assert difference.p == pytest.approx(0.0132, abs=1e-4)
    assert difference.low == pytest.approx(3 - 2.7764 * 1.5811 / math.sqrt(5), abs=1e-3)


def test_pairs_are_scipys() -> None:
    expected = stats.ttest_rel(INT8, BF16)
    difference = compare_pairs(INT8, BF16)
    assert difference.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert difference.p < stats.ttest_ind(INT8, BF16).pvalue  # what pairing is for


@pytest.mark.parametrize(
    ("values", "baseline", "p"),
    [
        ([0.5, 0.7], [0.5, 0.7], 1.0),  # the same
        ([0.3, 0.4], [0.2, 0.3], None),  # 0.1 twice, but for the last bit: nothing to judge by
    ],
)
def test_differences_without_spread(values: list[float], baseline: list[float], p: float) -> None:
    assert compare_pairs(values, baseline).p == p


def test_holm_by_hand() -> None:
    """0.005 · 4, 0.01 · 3, then 0.03 · 2 and 0.04 · 1, which may not come below it."""
    assert adjust_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_by_holm([0.6, 0.5]) == [1.0, 1.0]
    assert adjust_by_holm([]) == []


@given(PROBABILITIES)
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float]) -> None:
    """Holm's own procedure: reject while the k-th smallest p is under α / (m - k)."""
    alpha, m = 0.05, len(p_values)
    rejected = set()
    for k, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        if p_values[index] * (m - k) >= alpha:
            break
        rejected.add(index)
    adjusted = adjust_by_holm(p_values)
    assert {i for i in range(m) if adjusted[i] < alpha} == rejected


@given(PROBABILITIES)
def test_holm_lies_between_the_p_value_and_bonferroni(p_values: list[float]) -> None:
    for p, adjusted in zip(p_values, adjust_by_holm(p_values), strict=True):
        assert p <= adjusted <= min(1.0, len(p_values) * p)
