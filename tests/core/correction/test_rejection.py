"""Each filter against a naive loop over the tokens of each response."""

import math

import pytest
import torch

from flashrl.core.correction.rejection import Filter
from flashrl.core.mismatch.log_ratios import iter_blocks
from flashrl.errors import ConfigError

STATISTIC = {
    "ratio": math.exp,
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}


def aggregate(statistic, over, log_ratios):
    values = [STATISTIC[statistic](x) for x in log_ratios]
    if over == "max":
        return max(values)
    if statistic == "ratio":  # sums and means of logs are products and geometric means
        total = math.fsum(log_ratios)
        return math.exp(total if over == "sum" else total / len(log_ratios))
    return math.fsum(values) / (1 if over == "sum" else len(values))


@pytest.mark.parametrize("statistic", list(STATISTIC))
@pytest.mark.parametrize("over", ["token", "sum", "mean", "max"])
def test_filters_equal_a_naive_loop(statistic, over):
    batch, length = 40, 12
    rollout = -3 * torch.rand(batch, length, dtype=torch.float64) - 1
    old = rollout + 0.3 * torch.randn(batch, length, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (batch, 1))
    mask = torch.arange(length) < lengths
    low, high = {"ratio": (0.8, 1.3), "k1": (-0.3, 0.3)}.get(statistic, (0.0, 0.1))
    (block,) = iter_blocks(old, rollout, mask)
    keeps = Filter(statistic=statistic, over=over, low=low, high=high).keeps(block)
    keeps = keeps.expand(batch, length)
    expected = torch.zeros_like(mask)
    for row in range(batch):
        picked = (old - rollout)[row, : int(lengths[row])].tolist()
        for column, log_ratio in enumerate(picked):
            if over == "token":
                value = STATISTIC[statistic](log_ratio)
            else:
                value = aggregate(statistic, over, picked)
            expected[row, column] = low <= value <= high
    assert 0 < int(expected.sum()) < int(mask.sum())
    torch.testing.assert_close(keeps & mask, expected)


def test_bounds_are_on_the_ratio_and_included():
    log_ratio = torch.tensor([[0.5, 2.0, 0.49, 2.01]], dtype=torch.float64).log()
    rollout = torch.full_like(log_ratio, -3.0)
    (block,) = iter_blocks(rollout + log_ratio, rollout, torch.ones(1, 4))
    bounds = {"low": 0.5 - 1e-12, "high": 2.0 + 1e-12}
    keeps = Filter(statistic="ratio", over="token", **bounds).keeps(block)
    assert keeps.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"statistic": "k4", "over": "token"}, "statistic is 'k4'; allowed: 'ratio', 'k1'"),
        ({"statistic": "k1", "over": "all"}, "over is 'all'; allowed: 'token', 'sum'"),
        ({"statistic": "k1", "over": "sum", "low": 1.0, "high": 0.0}, "must not exceed high"),
        ({"statistic": "k1", "over": "sum", "low": math.nan}, "must not exceed high"),
    ],
)
def test_a_wrong_filter_says_what_is_allowed(fields, message):
    with pytest.raises(ConfigError, match=message):
        Filter(**fields)
