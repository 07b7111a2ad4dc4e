"""The corrections that OpenRLHF lacks, in its own loss.

A weight w ≥ 0 goes into the advantage: w · min(r A, clip(r) A) = min(r · wA, clip(r) · wA).  So
OpenRLHF's loss, with its own correction off, does the rest: clipping, dual clipping, averaging.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from flashrl.core.correction import CorrectionConfig, compute

__all__ = ["corrected"]

_Forward = Callable[..., tuple[Any, ...]]


def corrected(forward: _Forward, config: CorrectionConfig) -> _Forward:
    """``PolicyLoss.forward`` with a correction of ours in place of its own.

    Args:
        forward: OpenRLHF's.
        config: How ratios become weights; its objective says what r is a ratio to.

    Returns:
        The same function; its last two results are, as OpenRLHF's, the k1 mismatch of trainer and
        rollout in nats, and the share of tokens that were dropped.
    """
    config = attrs.evolve(config, on_invalid="mask")

    @functools.wraps(forward)
    def with_correction(
        self: Any,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor,
        **totals: Any,
    ) -> tuple[Any, ...]:
        weights, metrics = compute(
            old_log_probs=old_log_probs.float(),
            log_probs=log_probs.detach().float(),
            rollout_log_probs=rollout_log_probs.float(),
            response_mask=action_mask,
            advantages=advantages.float(),
            config=config,
        )
        counted = action_mask.bool()
        k1 = (rollout_log_probs - old_log_probs).detach()[counted].sum() / counted.sum().clamp(
            min=1
        )
        if config.objective == "bypass":
            old_log_probs = rollout_log_probs
        elif config.objective == "policy_gradient":
            old_log_probs = log_probs.detach()  # r = 1, and its gradient that of log π
        level, self.is_correction_level = self.is_correction_level, "off"
        try:
            loss, clip_ratio, ppo_kl, _, _ = forward(
                self,
                log_probs,
                old_log_probs,
                advantages * weights.to(advantages.dtype),
                action_mask=action_mask,
                rollout_log_probs=rollout_log_probs,
                **totals,
            )
        finally:
            self.is_correction_level = level
        return loss, clip_ratio, ppo_kl, k1, k1.new_tensor(metrics["dropped_fraction"])

    return with_correction
