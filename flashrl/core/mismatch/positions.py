"""The mismatch by position in the response: what a mean over all tokens hides.

An error that starts late, or grows with the context, such as that of an 8-bit KV cache
(sglang#25790, vllm#54035), is a step or a slope here.
"""

from __future__ import annotations

import torch

from flashrl.core.mismatch.log_ratios import bounded_exp, check_tensors, iter_blocks

__all__ = ["measure_positions"]


def measure_positions(
    *,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    log_mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """The k3 estimate of KL(μ‖π) at each position, ρ - 1 - ℓ (Schulman 2020).

    Args:
        old_log_probs: log π of the sampled tokens in nats, (batch, response_length).
        rollout_log_probs: log μ, of the distribution really sampled from, the same shape.
        response_mask: 1 where a token was sampled, the same shape.
        log_mass: log S where top-k, top-p or min-p truncated the support, the same shape.

    Returns:
        Nats, float64, (response_length,): a mean over the responses that have a usable token
        there, NaN where none has.

    Raises:
        ShapeError: The tensors disagree in shape, or one is missing.

    Example:
        >>> log_probs = torch.full((4, 3), -1.0)
        >>> rollout = log_probs - torch.tensor([0.0, 0.0, 1.0])
        >>> measure_positions(old_log_probs=log_probs, rollout_log_probs=rollout,
        ...                   response_mask=torch.ones(4, 3)).round(decimals=3).tolist()
        [0.0, 0.0, 0.718]
    """
    named = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
    if log_mass is not None:
        named["log_mass"] = log_mass
    check_tensors(response_mask, **named)
    total = response_mask.new_zeros(response_mask.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    for block in iter_blocks(old_log_probs, rollout_log_probs, response_mask, log_mass):
        # Masked tokens have ℓ = 0, and so nothing to add.
        k3 = bounded_exp(block.log_ratio.double()) - 1 - block.log_ratio.double()
        total += k3.sum(dim=0)
        count += block.mask.sum(dim=0)
    return total / count
