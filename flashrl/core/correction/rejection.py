"""Which tokens and sequences are too far from the rollout to learn from.

Every function takes a :class:`~flashrl.core.mismatch.log_ratios.RowBlock` and returns what is
kept: a boolean tensor, (rows, response_length), or (rows, 1) where a whole sequence stands or
falls.
"""

from __future__ import annotations

import math

import attrs
import torch

from flashrl.core.mismatch.log_ratios import RowBlock, bounded_exp
from flashrl.errors import ConfigError

__all__ = ["Filter", "within_off_policy_limit", "within_total_variation", "without_vetoed"]

_STATISTICS = ("ratio", "k1", "k2", "k3")
_OVER = ("token", "sum", "mean", "max")


@attrs.frozen(kw_only=True)
class Filter:
    """Keep what has a statistic within two bounds, both included.

    ``ratio`` is ρ itself, and its bounds are on ρ, not on 1/ρ: over ``sum`` it is the product
    exp(Σℓ), over ``mean`` the geometric mean exp(Σℓ / n).  ``k1`` = -ℓ, ``k2`` = ℓ²/2 and
    ``k3`` = ρ - 1 - ℓ are in nats (Schulman 2020; verl's ``rollout_rs``).

    Args:
        statistic: ``"ratio"``, ``"k1"``, ``"k2"`` or ``"k3"``.
        over: ``"token"`` drops single tokens; ``"sum"``, ``"mean"`` and ``"max"`` aggregate over
            the response and drop whole sequences.
        low: Smallest value kept.
        high: Largest value kept.

    Raises:
        ConfigError: A name is unknown, or the bounds are not in order.

    Example:
        >>> Filter(statistic="ratio", over="mean", low=0.99, high=1.01).over
        'mean'
    """

    statistic: str
    over: str
    low: float = -math.inf
    high: float = math.inf

    def __attrs_post_init__(self) -> None:
        faults = [
            f"{field} is {value!r}; allowed: {', '.join(map(repr, allowed))}"
            for field, value, allowed in (
                ("statistic", self.statistic, _STATISTICS),
                ("over", self.over, _OVER),
            )
            if value not in allowed
        ]
        if not self.low <= self.high:
            faults.append(f"low {self.low} must not exceed high {self.high}")
        if faults:
            raise ConfigError("filter: " + "; ".join(faults))

    def keeps(self, block: RowBlock) -> torch.Tensor:
        """What of the block is kept."""
        # Aggregated in log space: ρ over "sum" is a product.
        value = self._aggregate(block, self._token_values(block))
        if self.statistic == "ratio":
            value = bounded_exp(value)
        return (value >= self.low) & (value <= self.high)

    def _token_values(self, block: RowBlock) -> torch.Tensor:
        log_ratio = block.log_ratio
        if self.statistic == "ratio":
            return log_ratio
        if self.statistic == "k1":
            return -log_ratio
        if self.statistic == "k2":
            return log_ratio.square() / 2
        return bounded_exp(log_ratio) - 1 - log_ratio

    def _aggregate(self, block: RowBlock, values: torch.Tensor) -> torch.Tensor:
        if self.over == "token":
            return values
        if self.over == "max":
            return values.masked_fill(block.mask == 0, -math.inf).amax(dim=-1, keepdim=True)
        total = values.sum(dim=-1, keepdim=True)
        return total if self.over == "sum" else total / block.num_tokens.clamp(min=1).unsqueeze(-1)


def without_vetoed(block: RowBlock, *, floor: float) -> torch.Tensor:
    """Drop a sequence that holds a token with ρ under ``floor`` (verl's token veto).

    Such a token is one that the trainer all but rules out; what follows it is off the trainer's
    distribution altogether.
    """
    return block.log_ratio.amin(dim=-1, keepdim=True) >= math.log(floor)


def within_total_variation(
    block: RowBlock, advantages: torch.Tensor, *, delta: float
) -> torch.Tensor:
    """Drop a token that has already moved past ``delta`` the way its advantage pushes.

    Dropped if A > 0 and π - μ > δ, or A < 0 and π - μ < -δ: the binary total-variation mask of DPPO
    (arXiv:2602.04879), prime-rl's default.
    """
    return (block.policy.exp() - block.behavior.exp()) * advantages.sign() <= delta


def within_off_policy_limit(
    block: RowBlock, advantages: torch.Tensor, *, delta: float
) -> torch.Tensor:
    """Drop a token with A < 0 in a sequence whose mean log μ - log π exceeds ``delta``.

    The off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556): a failure that the trainer
    would hardly have produced teaches it nothing.
    """
    return (advantages >= 0) | (-block.mean_log_ratio.unsqueeze(-1) <= delta)
