"""Policy losses that take the weights of :mod:`flashrl.core.correction`.

r = exp(``log_probs`` - ``old_log_probs``), w the weight, sg the stop-gradient, A the advantage:

- decoupled: -E[ sg(w) · min(r A, clip(r, 1 - ε_low, 1 + ε_high) A) ] (Hilton et al. 2021,
  arXiv:2110.00641, decoupled PPO; Yao et al. 2025 for the truncated weight);
- bypass: the same with μ in place of π_old, and w only 0 or 1;
- policy_gradient: -E[ sg(w) · A · log π_θ ], whose gradient is that of truncated importance
  sampling.
"""

from __future__ import annotations

import torch

from flashrl.core.correction.weights import CorrectionConfig, get_config
from flashrl.core.mismatch.log_ratios import MAX_LOG_RATIO, check_advantages, check_tensors
from flashrl.errors import ConfigError, UnknownNameError

__all__ = ["AGGREGATIONS", "aggregate", "policy_loss"]

AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
"""Mean over tokens; over sequences of the sum of their tokens, or of the mean of their tokens."""


def policy_loss(
    log_probs: torch.Tensor,
    *,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    weights: torch.Tensor,
    old_log_probs: torch.Tensor | None = None,
    rollout_log_probs: torch.Tensor | None = None,
    log_mass: torch.Tensor | None = None,
    config: str | CorrectionConfig = "default",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: str = "token_mean",
    total: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the corrected policy loss.

    Args:
        log_probs: log π_θ, the only tensor that gets a gradient, (batch, response_length).
        advantages: (batch, response_length) or (batch,).
        response_mask: 1 where a token was sampled, (batch, response_length).
        weights: From :func:`flashrl.core.correction.compute`, (batch, response_length).
        old_log_probs: log π_old, the same shape; for objective ``"decoupled"``.
        rollout_log_probs: log μ, the same shape; for objective ``"bypass"``.
        log_mass: log S where the support was truncated, the same shape; for ``"bypass"``.
        config: The preset or configuration that made the weights: objective and denominator.
        clip_low: ε_low of the PPO clip.
        clip_high: ε_high of the PPO clip.
        aggregation: One of :data:`AGGREGATIONS`.
        total: The tokens (or sequences) of the whole batch, if this is a part of it.

    Returns:
        A scalar to minimize.  0 with zero gradient if everything was dropped (verl#3984).

    Raises:
        UnknownNameError: No such preset or aggregation.
        ConfigError: The objective needs log-probabilities that were not given.
        ShapeError: Tensors disagree in shape or device; nothing is broadcast.

    Example:
        >>> loss = policy_loss(torch.tensor([[-1.0, -2.0]]), advantages=torch.tensor([1.0]),
        ...                    old_log_probs=torch.tensor([[-1.0, -2.0]]),
        ...                    response_mask=torch.ones(1, 2), weights=torch.ones(1, 2))
        >>> loss
        tensor(-1.)
    """
    config = get_config(config)
    check_tensors(response_mask, log_probs=log_probs, weights=weights)
    advantages = check_advantages(advantages, response_mask)
    kept = (response_mask != 0) & (weights != 0)
    # What is dropped is zeroed before any arithmetic: 0 · NaN is NaN, in the gradient too.
    if config.objective == "policy_gradient":
        surrogate = advantages * torch.where(kept, log_probs, 0.0)
    else:
        name = "old_log_probs" if config.objective == "decoupled" else "rollout_log_probs"
        reference = old_log_probs if config.objective == "decoupled" else rollout_log_probs
        if reference is None:
            raise ConfigError(f"objective {config.objective!r} needs {name}, which were not given")
        check_tensors(response_mask, **{name: reference})
        if config.objective == "bypass" and log_mass is not None:
            check_tensors(response_mask, log_mass=log_mass)
            reference = reference + log_mass
        log_ratio = torch.where(kept, log_probs - reference.detach(), 0.0)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return aggregate(
        -surrogate,
        response_mask=response_mask,
        weights=weights,
        aggregation=aggregation,
        denominator=config.denominator,
        total=total,
    )


def aggregate(
    losses: torch.Tensor,
    *,
    response_mask: torch.Tensor,
    weights: torch.Tensor | None = None,
    aggregation: str = "token_mean",
    denominator: str = "fixed",
    total: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Weigh the losses of tokens and average them.

    Dropped tokens count in no sum; whether they count in the denominator is ``denominator``.

    Args:
        losses: Loss of each token, (batch, response_length).
        response_mask: 1 where a token was sampled, the same shape.
        weights: Factor of each token, 0 for a dropped one, the same shape; None for ones.
        aggregation: One of :data:`AGGREGATIONS`.
        denominator: ``"fixed"`` divides by all response tokens (or sequences that have any),
            ``"kept"`` by those with a weight that is not 0.
        total: Divide by this instead of this part's own number of tokens (``token_mean``) or
            sequences, so that the losses of micro-batches or ranks add up to that of the batch.

    Returns:
        A scalar; 0 if nothing is left.

    Raises:
        UnknownNameError: No such aggregation or denominator.
        ShapeError: Tensors disagree in shape or device: a loss per sequence is refused even where
            batch and response_length are equal (verl#3245).

    Example:
        >>> aggregate(torch.tensor([[1.0, 3.0]]), response_mask=torch.ones(1, 2),
        ...           weights=torch.tensor([[1.0, 0.0]]))
        tensor(0.5000)
    """
    if denominator not in ("fixed", "kept"):
        raise UnknownNameError(f"unknown denominator {denominator!r}; known: fixed, kept")
    if weights is None:
        weights = torch.ones_like(losses)
    check_tensors(response_mask, losses=losses, weights=weights)
    in_response = response_mask != 0
    kept = in_response & (weights != 0)
    counted = kept if denominator == "kept" else in_response
    weights = torch.where(kept, weights.detach(), 0.0).to(losses.dtype)
    losses = torch.where(kept, losses, 0.0) * weights

    num_tokens = counted.sum(dim=-1)
    if aggregation == "token_mean":
        return losses.sum() / _divisor(num_tokens.sum(), total)
    per_sequence = losses.sum(dim=-1)
    if aggregation == "seq_mean_token_mean":
        per_sequence = per_sequence / num_tokens.clamp(min=1)
    elif aggregation != "seq_mean_token_sum":
        raise UnknownNameError(
            f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}"
        )
    return per_sequence.sum() / _divisor((num_tokens > 0).sum(), total)


def _divisor(count: torch.Tensor, total: float | torch.Tensor | None) -> float | torch.Tensor:
    return count.clamp(min=1) if total is None else total
