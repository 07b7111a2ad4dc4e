"""What :mod:`flashrl.core.mismatch` adds up: sums, extremes and histograms of a block of rows.

ρ - 1 is summed, not ρ, wherever a small mismatch would drown in the rounding of sums near 1.
"""

from __future__ import annotations

import math

import torch

from flashrl.core.mismatch.histogram import count_bins
from flashrl.core.mismatch.log_ratios import MAX_LOG_RATIO, RowBlock

__all__ = ["MAXIMA", "NEVER", "SUMS", "sum_block"]

SUMS = (
    "num_tokens",
    "num_sequences",
    "num_invalid",
    "num_zero",
    "log_ratio",
    "log_ratio_squared",
    "excess",  # ρ - 1
    "excess_squared",
    "squared",
    "outside",
    "excess_log_ratio",
    "js",
    "tmpe_excess",
    "prob_diff",
    "sequence_excess",
    "sequence_squared_excess",
    "geometric_excess",
    "is_weighted",
    "weight_excess",
    "weight_excess_squared",
    "weight_squared",
    "weight_outside",
    "sequence_weight",
    "num_truncated",
    "num_dropped",
    "num_dropped_sequences",
)
"""What is summed over tokens or, where the name says so, over sequences."""

MAXIMA = ("log_ratio", "minus_log_ratio", "prob_diff", "weight", "minus_weight")
"""What the largest is kept of; a smallest value is the largest of its negative."""

NEVER = 2.0**100
"""Minus this is the maximum of nothing."""

_OUTSIDE = 0.1


def sum_block(
    block: RowBlock,
    weights: torch.Tensor | None = None,
    num_truncated: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up one block of rows; each quantity in one sweep, nothing copied to the host.

    Args:
        block: The rows.
        weights: Their importance weights, 0 wherever a token does not count or was dropped,
            (rows, response_length).
        num_truncated: Ratios of each row that a bound changed, (rows,); None for none.

    Returns:
        The sums, float64, in the order of :data:`SUMS`; the maxima, float64, in that of
        :data:`MAXIMA`; the histograms of ℓ and of log w, int64, (2, bins).
    """
    sums, maxima, counts = _measure_ratios(block)
    log_weight_counts = torch.zeros_like(counts)
    if weights is not None:
        weight_sums, weight_maxima, log_weight_counts = _measure_weights(block, weights)
        sums |= weight_sums
        maxima |= weight_maxima
        if num_truncated is not None:
            sums["num_truncated"] = num_truncated
    nothing = torch.zeros_like(block.num_tokens)
    rows_of_sums = torch.stack([sums.get(name, nothing) for name in SUMS])
    rows_of_maxima = torch.stack([maxima.get(name, nothing - NEVER) for name in MAXIMA])
    # A row is summed in its own precision, the rows in float64: digits do not get lost.
    return (
        rows_of_sums.sum(dim=-1, dtype=torch.float64),
        rows_of_maxima.amax(dim=-1).to(torch.float64),
        torch.stack([counts, log_weight_counts]),
    )


_Measured = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]
"""Sums and maxima of each row, (rows,), and the histogram of all rows."""


def _measure_ratios(block: RowBlock) -> _Measured:
    log_ratio, mask = block.log_ratio, block.mask
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = clamped.expm1()
    prob_diff = (block.policy.exp() - block.behavior.exp()).abs_()
    sequence = block.sequence_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    geometric = block.mean_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    num_nonzero = block.behavior.sign().abs_().sum(dim=-1)
    penalty = (1 - mask).mul_(NEVER)  # keeps masked positions out of a maximum
    sums = {
        "num_tokens": block.num_tokens,
        "num_sequences": block.num_tokens.clamp(max=1),
        "num_invalid": block.num_invalid,
        "num_zero": block.num_tokens - num_nonzero,
        "log_ratio": block.sequence_log_ratio,
        "log_ratio_squared": log_ratio.square().sum(dim=-1),
        **_moments("", excess, mask),
        "excess_log_ratio": (excess * log_ratio).sum(dim=-1),
        "js": _jensen_shannon(clamped, excess).sum(dim=-1),
        "tmpe_excess": clamped.abs().expm1_().sum(dim=-1),
        "prob_diff": prob_diff.sum(dim=-1),
        "sequence_excess": sequence.expm1(),
        "sequence_squared_excess": (2 * sequence).expm1_(),
        "geometric_excess": geometric.expm1_(),
    }
    maxima = {
        "log_ratio": (log_ratio - penalty).amax(dim=-1),
        "minus_log_ratio": -(log_ratio + penalty).amin(dim=-1),
        "prob_diff": prob_diff.amax(dim=-1),
    }
    return sums, maxima, count_bins(clamped, mask)


def _measure_weights(block: RowBlock, weights: torch.Tensor) -> _Measured:
    mask, num_tokens = block.mask, block.num_tokens
    num_kept = weights.sign().sum(dim=-1)
    penalty = (1 - mask).mul_(NEVER)
    sums = {
        "is_weighted": torch.ones_like(num_tokens),
        **_moments("weight_", weights - mask, mask),
        "sequence_weight": weights.sum(dim=-1) / num_tokens.clamp(min=1),
        "num_dropped": num_tokens - num_kept,
        "num_dropped_sequences": num_tokens.clamp(max=1) - num_kept.clamp(max=1),
    }
    maxima = {
        "weight": weights.amax(dim=-1),
        "minus_weight": -(weights + penalty).amin(dim=-1),
    }
    log_weights = weights.clamp(min=math.exp(-MAX_LOG_RATIO)).log_()
    return sums, maxima, count_bins(log_weights, mask)


def _jensen_shannon(log_ratio: torch.Tensor, excess: torch.Tensor) -> torch.Tensor:
    """½[ρℓ - (1+ρ) log((1+ρ)/2)], written with ρ - 1 to keep its digits near ρ = 1."""
    mixture = (1 + excess).mul_(log_ratio) - (2 + excess).mul_((excess / 2).log1p_())
    return mixture.div_(2)


def _moments(prefix: str, excess: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums of w - 1, its square and w², and how many w lie outside [0.9, 1.1].

    Near w = 1 the spread is lost in sums of w, near w = 0 the scale in sums of w - 1.
    """
    return {
        f"{prefix}excess": excess.sum(dim=-1),
        f"{prefix}excess_squared": excess.square().sum(dim=-1),
        f"{prefix}squared": (excess + mask).square_().sum(dim=-1),
        f"{prefix}outside": (excess.abs() > _OUTSIDE).sum(dim=-1),
    }
