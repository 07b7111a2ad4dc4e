"""The metrics of :mod:`flashrl.core.mismatch`, from sums that add up."""

from __future__ import annotations

import math

import attrs
import torch

from flashrl.core.mismatch.histogram import NUM_BINS, fold, percentile
from flashrl.core.mismatch.log_ratios import (
    MAX_LOG_RATIO,
    RowBlock,
    check_tensors,
    iter_blocks,
    raise_invalid,
)
from flashrl.core.mismatch.sums import MAXIMA, NEVER, SUMS, sum_block

__all__ = ["MismatchState", "measure", "measure_block"]


@attrs.frozen(kw_only=True, eq=False)
class MismatchState:
    """What a shard knows of the mismatch; the states of shards add up to that of the whole.

    A shard is any set of whole sequences: a micro-batch, or what one data-parallel rank holds.
    Sums and extremes are exact however the batch was cut.  Percentiles come from a histogram of ℓ,
    so they are within 0.2 % of ℓ, or 1.2e-4 where ℓ is smaller than that, and do not depend on the
    cut either.

    Args:
        sums: Sums over tokens and over sequences, float64.
        maxima: Largest values, float64.
        counts: Histograms of ℓ and of the log of the weight, int64.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0]])
        >>> state = measure(old_log_probs=log_probs, rollout_log_probs=log_probs,
        ...                 response_mask=torch.ones(1, 2))
        >>> (state + state).compute()["num_tokens"]
        4.0
    """

    sums: torch.Tensor
    maxima: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> MismatchState:
        """The state of no tokens, which adds nothing."""
        return cls(
            sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            maxima=torch.full((len(MAXIMA),), -NEVER, dtype=torch.float64, device=device),
            counts=torch.zeros(2, NUM_BINS, dtype=torch.int64, device=device),
        )

    def __add__(self, other: MismatchState) -> MismatchState:
        """The state of the sequences of both."""
        return MismatchState(
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
            counts=self.counts + other.counts,
        )

    def all_reduce(self, group: torch.distributed.ProcessGroup | None = None) -> MismatchState:
        """The state of the sequences of every rank, on every rank.

        Args:
            group: The ranks that hold different sequences; None for all ranks.

        Returns:
            The sum over the ranks; this state is not changed.
        """
        whole = self + MismatchState.empty(self.sums.device)  # a copy: all_reduce writes into it
        torch.distributed.all_reduce(whole.sums, group=group)
        torch.distributed.all_reduce(whole.counts, group=group)
        torch.distributed.all_reduce(whole.maxima, torch.distributed.ReduceOp.MAX, group=group)
        return whole

    def sum_of(self, name: str) -> torch.Tensor:
        """One of the sums, a float64 scalar on the state's device."""
        return self.sums[SUMS.index(name)]

    def compute(self) -> dict[str, float]:
        """The metrics; one transfer from the device.

        Returns:
            Metric → value, always finite.  Without any token they are those of two equal
            distributions.  ``weight_*``, ``truncated_fraction`` and ``dropped_*`` are there only if
            weights were measured.
        """
        log_ratios, log_weights = self.counts
        table = torch.stack([log_ratios, fold(log_ratios), log_weights])
        values = torch.cat([self.sums, self.maxima, percentile(table, 95)]).tolist()
        total = dict(zip(SUMS, values, strict=False))
        most = {
            name: 0.0 if value == -NEVER else value
            for name, value in zip(MAXIMA, values[len(SUMS) :], strict=False)
        }
        log_p95, abs_log_p95, weight_log_p95 = values[-3:]
        metrics = _ratio_metrics(total, most, log_p95, abs_log_p95)
        if total["is_weighted"]:
            metrics |= _weight_metrics(total, most, weight_log_p95)
        return metrics


def _ratio_metrics(
    total: dict[str, float], most: dict[str, float], log_p95: float, abs_log_p95: float
) -> dict[str, float]:
    num_tokens, num_sequences = _at_least_one(total["num_tokens"], total["num_sequences"])
    mean = {name: value / num_tokens for name, value in total.items()}
    over_sequences = {name: value / num_sequences for name, value in total.items()}
    k1, excess = 0.0 - mean["log_ratio"], mean["excess"]
    reverse_k1 = mean["excess_log_ratio"] + mean["log_ratio"]
    largest, smallest = most["log_ratio"], -most["minus_log_ratio"]
    return {
        "num_tokens": total["num_tokens"],
        "num_sequences": total["num_sequences"],
        "invalid_fraction": total["num_invalid"]
        / _at_least_one(total["num_tokens"] + total["num_invalid"])[0],
        "zero_fraction": mean["num_zero"],
        "k1": k1,
        "k2": mean["log_ratio_squared"] / 2,
        "k3": max(0.0, excess + k1),
        "reverse_k1": reverse_k1,
        "reverse_k3": max(0.0, reverse_k1 - excess),
        "js": max(0.0, mean["js"]),
        "chi2_token": mean["excess_squared"] + 2 * excess,
        "chi2_sequence": over_sequences["sequence_squared_excess"],
        "ess": _ess(total["excess"], total["squared"], total["num_tokens"]),
        "ess_sequence": _ess(
            total["sequence_excess"],
            total["sequence_squared_excess"] + total["num_sequences"],
            total["num_sequences"],
        ),
        "ppl_ratio": _exp(k1),
        "tmpe": 1 + mean["tmpe_excess"],
        "prob_diff_mean": mean["prob_diff"],
        "prob_diff_max": most["prob_diff"],
        "log_ratio_std": _std(k1, mean["log_ratio_squared"]),
        "log_ratio_p95": min(max(0.0, abs_log_p95), max(largest, -smallest)),
        "log_ratio_max": max(largest, -smallest),
        "ratio_mean": 1 + excess,
        "ratio_std": _std(excess, mean["excess_squared"]),
        "ratio_p95": _exp(min(max(log_p95, smallest), largest)),
        "ratio_max": _exp(largest),
        "ratio_min": _exp(smallest),
        "ratio_outside": mean["outside"],
        "geometric_ratio_mean": 1 + over_sequences["geometric_excess"],
    }


def _weight_metrics(
    total: dict[str, float], most: dict[str, float], log_p95: float
) -> dict[str, float]:
    num_tokens, num_sequences = _at_least_one(total["num_tokens"], total["num_sequences"])
    mean = {name: value / num_tokens for name, value in total.items()}
    excess, excess_squared = mean["weight_excess"], mean["weight_excess_squared"]
    largest, smallest = most["weight"], -most["minus_weight"]
    return {
        "weight_mean": 1 + excess,
        "weight_std": _std(excess, excess_squared),
        "weight_p95": min(max(_exp(log_p95), smallest), largest),
        "weight_max": largest,
        "weight_min": smallest,
        "weight_outside": mean["weight_outside"],
        "weight_ess": _ess(total["weight_excess"], total["weight_squared"], total["num_tokens"]),
        "weight_sequence_mean": total["sequence_weight"] / num_sequences,
        "truncated_fraction": mean["num_truncated"],
        "dropped_fraction": mean["num_dropped"],
        "dropped_sequence_fraction": total["num_dropped_sequences"] / num_sequences,
    }


def measure(
    *,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    weights: torch.Tensor | None = None,
    log_mass: torch.Tensor | None = None,
    on_invalid: str = "raise",
) -> MismatchState:
    """Measure a batch, or one shard of it.

    Args:
        old_log_probs: log π of the sampled tokens in nats, (batch, response_length).
        rollout_log_probs: log μ, of the distribution really sampled from, the same shape.
        response_mask: 1 where a token was sampled, the same shape.  What masked positions hold
            never matters.
        weights: The importance weights in use, to be measured beside the ratio, the same shape.
        log_mass: log S where top-k, top-p or min-p truncated the support, the same shape.
        on_invalid: ``"raise"``, or ``"mask"`` to leave out tokens whose log-probability is NaN,
            infinite or positive and report their share as ``invalid_fraction``.

    Returns:
        The state; ``.compute()`` gives the metrics.

    Raises:
        ShapeError: The tensors disagree in shape, or one is missing.
        NonFiniteError: A response token has no usable log-probability.

    Example:
        >>> import torch
        >>> state = measure(old_log_probs=torch.tensor([[-0.5]]),
        ...                 rollout_log_probs=torch.tensor([[-0.5]]) - torch.tensor(2.0).log(),
        ...                 response_mask=torch.ones(1, 1))
        >>> metrics = state.compute()
        >>> [round(metrics[name], 3) for name in ("k1", "k2", "k3")]
        [-0.693, 0.24, 0.307]
    """
    named = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
    if log_mass is not None:
        named["log_mass"] = log_mass
    check_tensors(response_mask, **named, **({} if weights is None else {"weights": weights}))
    state = MismatchState.empty(response_mask.device)
    for block in iter_blocks(old_log_probs, rollout_log_probs, response_mask, log_mass):
        if weights is None:
            state += measure_block(block)
        else:
            used = weights[block.rows].detach().to(block.mask.dtype)
            state += measure_block(block, used.nan_to_num(0.0) * block.mask)
    if on_invalid == "raise" and state.sum_of("num_invalid") > 0:
        raise_invalid(response_mask, **named)
    return state


def measure_block(
    block: RowBlock,
    weights: torch.Tensor | None = None,
    num_truncated: torch.Tensor | None = None,
) -> MismatchState:
    """Measure one block of rows, copying nothing to the host.

    Args:
        block: The rows.
        weights: Their importance weights, 0 wherever a token does not count or was dropped,
            (rows, response_length).
        num_truncated: Ratios of each row that a bound changed, (rows,); None for none.

    Returns:
        The state of these rows.
    """
    sums, maxima, counts = sum_block(block, weights, num_truncated)
    return MismatchState(sums=sums, maxima=maxima, counts=counts)


def _at_least_one(*counts: float) -> tuple[float, ...]:
    """Denominators that are safe to divide by."""
    return tuple(max(1.0, count) for count in counts)


def _exp(log_value: float) -> float:
    return math.exp(min(max(log_value, -MAX_LOG_RATIO), MAX_LOG_RATIO))


def _std(mean: float, mean_square: float) -> float:
    """Standard deviation of the tokens themselves (not of a population they stand for)."""
    return math.sqrt(max(0.0, mean_square - mean * mean))


def _ess(excess: float, squared: float, count: float) -> float:
    """(Σw)² / (n Σw²) from Σ(w - 1), Σw² and n; 0 if every weight is 0, 1 if there is none."""
    if not count:
        return 1.0
    return min(1.0, (excess + count) ** 2 / (count * squared)) if squared else 0.0
