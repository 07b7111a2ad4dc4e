"""What a few seeds allow to say: intervals, tests by seed, and many tests at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs

from flashrl.errors import MissingDependencyError

try:
    from scipy import stats
except ImportError as error:
    raise MissingDependencyError(
        "comparing runs by their seeds needs SciPy, which is not installed; "
        "pip install 'flashrl[report]'"
    ) from error

__all__ = ["LEVEL", "Difference", "Interval", "adjust_by_holm", "compare_pairs", "estimate_mean"]

LEVEL = 0.95
"""How often an interval holds what it is for."""

_NO_SPREAD = 1e-12


@attrs.frozen(kw_only=True)
class Interval:
    """A mean and where the true one may lie.

    Args:
        mean: Of the values.
        half_width: What the interval reaches to either side; infinite for a single value, which
            says nothing of its spread.
        num: How many values.
    """

    mean: float
    half_width: float
    num: int

    @property
    def low(self) -> float:
        """Its lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Its upper end."""
        return self.mean + self.half_width


@attrs.frozen(kw_only=True)
class Difference(Interval):
    """The mean of paired differences.

    Args:
        p: How probable so large a mean is without a difference; None where that cannot be said: of
            one pair, and of equal differences that are not zero.
    """

    p: float | None


def estimate_mean(values: Sequence[float]) -> Interval:
    """A mean with Student's interval: mean ± t · s / √n with n - 1 degrees of freedom.

    Args:
        values: At least one.

    Example:
        >>> interval = estimate_mean([1.0, 2.0, 3.0])
        >>> round(interval.low, 3), round(interval.high, 3)
        (-0.484, 4.484)
    """
    num = len(values)
    half_width = math.inf
    if num > 1:
        quantile = float(stats.t.ppf((1 + LEVEL) / 2, num - 1))
        half_width = quantile * statistics.stdev(values) / math.sqrt(num)
    return Interval(mean=statistics.fmean(values), half_width=half_width, num=num)


def compare_pairs(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The paired t-test: whether values differ from their partners in the mean.

    Args:
        values: At least one.
        baseline: The partner of each.

    Example:
        >>> round(compare_pairs([1.0, 2.0, 4.0], [0.0, 1.0, 1.0]).p, 4)
        0.1296
    """
    differences = [value - other for value, other in zip(values, baseline, strict=True)]
    interval = estimate_mean(differences)
    p: float | None = None
    if max(differences) - min(differences) > _NO_SPREAD:
        p = float(stats.ttest_rel(values, baseline).pvalue)
    elif len(differences) > 1 and abs(interval.mean) <= _NO_SPREAD:
        p = 1.0
    return Difference(**attrs.asdict(interval), p=p)


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """p-values for many tests at once (Holm, Scand. J. Statist. 6, 1979).

    The smallest is multiplied by the number of tests, the next by one less, and so on; none is
    smaller than one before it.

    Args:
        p_values: One for each test, in any order.

    Returns:
        The adjusted ones, in the same order.

    Example:
        >>> adjust_by_holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
