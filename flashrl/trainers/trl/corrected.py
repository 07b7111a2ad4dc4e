"""TRL's GRPO trainer with a correction of :mod:`flashrl.core.correction`.

TRL corrects by itself what its own vLLM generated, in four ways.  For the others, and for rollouts
from elsewhere, the importance weights go into the advantages: w ≥ 0, so
w · min(r A, clip(r) A) = min(r · wA, clip(r) · wA), which is TRL's own loss with one advantage a
token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashrl.core.correction import CorrectionConfig
from flashrl.errors import ConfigError, MissingDependencyError
from flashrl.trainers import corrections
from flashrl.trainers.metrics import measure_correction
from flashrl.trainers.trl.batches import log_metrics, log_value, loss_mask

try:
    from trl import GRPOTrainer
except ImportError as error:
    raise MissingDependencyError(
        "this trainer is TRL's, which is not installed; pip install 'flashrl[trl]'"
    ) from error

__all__ = ["CorrectedGRPOTrainer"]


class CorrectedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer``, with any correction of ours in place of TRL's own.

    Args:
        correction: A name that :func:`flashrl.trainers.corrections.find` knows, or a
            configuration; ``"off"`` measures the mismatch and corrects nothing.
        **kwargs: What ``GRPOTrainer`` takes.

    Raises:
        ConfigError: Something is asked for that TRL's loss cannot express, or that would correct
            twice; the message lists all.

    Attributes:
        token_log_probs: log π and log μ of the newest batch's sampled tokens, each (tokens,).
    """

    def __init__(self, *, correction: str | CorrectionConfig = "default", **kwargs: Any) -> None:
        if isinstance(correction, str):
            correction = corrections.find(correction)
        self.correction = correction
        self.token_log_probs: tuple[Tensor, Tensor] | None = None
        faults = self._find_faults(kwargs)
        if faults:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(faults))
        super().__init__(**kwargs)

    def _find_faults(self, kwargs: Mapping[str, Any]) -> list[str]:
        """What ``GRPOTrainer``'s arguments ask for that does not go with this trainer."""
        args, correction = kwargs.get("args"), self.correction
        faults = []
        if args is not None and args.use_vllm and args.vllm_importance_sampling_correction:
            faults.append(
                "args.vllm_importance_sampling_correction is True; TRL's correction would act "
                "beside this one, turn it off"
            )
        if args is not None and args.loss_type == "vespo":
            faults.append("args.loss_type is 'vespo', which weighs whole sequences in its own way")
        if correction.objective == "policy_gradient" or correction.denominator != "fixed":
            faults.append(
                f"correction {correction.name!r} has objective {correction.objective!r} and "
                f"denominator {correction.denominator!r}; TRL's loss allows 'decoupled' or "
                "'bypass', and 'fixed'"
            )
        return faults

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with the importance weights in its advantages."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self._score(batch)
        mask = loss_mask(batch)
        old_log_probs = batch["old_per_token_logps"]
        rollout_log_probs = batch["sampling_per_token_logps"]
        log_mass = self._log_mass(mask)
        # μ was divided by S and π was not: log μ + log S is what π compares with.
        comparable = rollout_log_probs if log_mass is None else rollout_log_probs + log_mass
        weights, metrics = measure_correction(
            old_log_probs=old_log_probs,
            rollout_log_probs=comparable,
            response_mask=mask,
            advantages=batch["advantages"],
            correction=self.correction,
        )
        batch["advantages"] = batch["advantages"].unsqueeze(1) * weights
        if self.correction.objective == "bypass":
            batch["old_per_token_logps"] = comparable
        log_metrics(self, metrics)
        chosen = mask.bool()
        self.token_log_probs = old_log_probs[chosen].cpu(), rollout_log_probs[chosen].cpu()
        return batch

    def _score(self, batch: dict[str, Any]) -> Tensor:
        """The trainer's log π of the sampled tokens, (batch, response_length).

        TRL itself does without when generation and optimizer steps are aligned, for then log π is
        known at the loss; the weights are needed before.
        """
        started = time.perf_counter()
        with torch.no_grad():
            log_probs, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
            )
        log_value(self, "score_ms", 1000 * (time.perf_counter() - started))
        scored: Tensor = log_probs
        return scored

    def _log_mass(self, mask: Tensor) -> Tensor | None:
        """log S of each token, where sampling truncated the support; vLLM does not report it."""
        return None
