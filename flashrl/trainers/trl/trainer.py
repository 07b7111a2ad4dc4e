"""TRL's GRPO trainer with rollouts from a session, and the correction that goes with them.

TRL corrects only what its own vLLM generated.  Here completions come from any engine that a
:class:`flashrl.Session` holds, through TRL's ``rollout_func``, and the importance weights go into
the advantages: w ≥ 0, so w · min(r A, clip(r) A) = min(r · wA, clip(r) · wA), which is TRL's own
loss with one advantage a token.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashrl.core.correction import CorrectionConfig, compute, get_config
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.errors import ConfigError, MissingDependencyError
from flashrl.session import Session

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise MissingDependencyError(
        "this trainer is TRL's, which is not installed; pip install 'flashrl[trl]'"
    ) from error

__all__ = ["METRICS", "SessionGRPOTrainer"]

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "kl": "k3",
        "ess": "ess",
        "ratio_mean": "ratio_mean",
        "ratio_sd": "ratio_std",
        "ratio_p95": "ratio_p95",
        "ratio_max": "ratio_max",
        "log_ratio_sd": "log_ratio_std",
        "frac_truncated": "truncated_fraction",
    }
)
"""What ``flashrl/<key>`` in the trainer's log is called in :mod:`flashrl.core.mismatch`.

Beside them stand ``update_ms``, ``generate_ms`` and ``score_ms``, milliseconds for one batch of
rollouts; ``version_lag``, optimizer steps between the weights that sampled and those that train;
and ``scheme``, a name.
"""


class SessionGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer``, generating with a session's engine and corrected for it.

    Before it generates, it pushes its weights if an optimizer step has changed them.  They go in
    the precision that the trainer has, and the engine rounds them once, to its own: on a way
    through bfloat16, whatever moves a weight by less than half of its last place would be lost.

    Args:
        session: The attached engine: a copy of the policy, sharing no memory with it.
        correction: A preset's name or a configuration of :mod:`flashrl.core.correction`;
            ``"off"`` measures the mismatch and corrects nothing.
        stop_token_ids: A completion ends with any of these; without them, with the end-of-sequence
            tokens that TRL finds.
        **kwargs: What ``GRPOTrainer`` takes, except ``rollout_func``.

    Raises:
        ConfigError: Something is asked for that this trainer does not do; the message lists all.

    Attributes:
        token_log_probs: log π and log μ of the newest batch's sampled tokens, each (tokens,).
    """

    def __init__(
        self,
        *,
        session: Session,
        correction: str | CorrectionConfig = "default",
        stop_token_ids: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        self.session = session
        self.correction = get_config(correction)
        self.token_log_probs: tuple[Tensor, Tensor] | None = None
        self._rollout: Rollout | None = None
        self._pushed_step: int | None = None
        _check(kwargs, self.correction)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
            super().__init__(rollout_func=_sample, **kwargs)
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"the session belongs to one process, and {self.accelerator.num_processes} train; "
                "use TRL's own vLLM generation with FLASHRL_CONFIG for more"
            )
        self.sampling_params = _sampling_params(
            self.args, stop_token_ids=stop_token_ids or self.eos_token_ids
        )

    def sample(self, prompts: list[Any]) -> dict[str, Any]:
        """Generate one completion for each prompt, with the newest weights.

        Args:
            prompts: As the data set has them: text, or messages.

        Returns:
            ``prompt_ids``, ``completion_ids`` and ``logprobs``, as TRL's ``rollout_func`` does.
        """
        if self._pushed_step != self.state.global_step:
            started = time.perf_counter()
            self.session.update_weights(
                self.model.named_parameters(), version=self.state.global_step
            )
            self._pushed_step = self.state.global_step
            self._log_milliseconds("update_ms", started)
        started = time.perf_counter()
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        self._rollout = rollout = self.session.generate(prompt_ids, self.sampling_params)
        self._log_milliseconds("generate_ms", started)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": _unpad(rollout.response_ids, rollout.response_mask),
            "logprobs": _unpad(rollout.rollout_log_probs, rollout.response_mask),
        }

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with the importance weights in its advantages."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self._score(batch)
        mask = batch["completion_mask"]
        weights, metrics = compute(
            old_log_probs=batch["old_per_token_logps"],
            rollout_log_probs=batch["sampling_per_token_logps"],
            response_mask=mask,
            advantages=batch["advantages"],
            log_mass=self._log_mass(mask),
            config=self.correction,
        )
        batch["advantages"] = batch["advantages"].unsqueeze(1) * weights
        for name, measured in METRICS.items():
            self._log_value(name, metrics[measured])
        chosen = mask.bool()
        self.token_log_probs = (
            batch["old_per_token_logps"][chosen].cpu(),
            batch["sampling_per_token_logps"][chosen].cpu(),
        )
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
        self._log_milliseconds("score_ms", started)
        scored: Tensor = log_probs
        return scored

    def _log_mass(self, mask: Tensor) -> Tensor | None:
        """The rollout's log S, padded as TRL pads."""
        assert self._rollout is not None  # the batch was made from it
        log_mass = self._rollout.log_mass
        if log_mass is None:
            return None
        padding = mask.shape[1] - log_mass.shape[1]
        return torch.nn.functional.pad(log_mass.to(mask.device), (0, padding))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss; also notes how old the weights are that sampled this batch."""
        if self._rollout is not None and self._rollout.version is not None:
            self._log_value("version_lag", self.state.global_step - self._rollout.version)
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """TRL's log, and the scheme's name."""
        if "tensorboard" not in self.args.report_to:  # it takes numbers only, and would complain
            logs["flashrl/scheme"] = self.session.scheme.name
        super().log(logs, start_time)

    def _log_value(self, name: str, value: float) -> None:
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][f"flashrl/{name}"].append(float(value))

    def _log_milliseconds(self, name: str, started: float) -> None:
        self._log_value(name, 1000 * (time.perf_counter() - started))


def _sample(prompts: list[Any], trainer: SessionGRPOTrainer) -> dict[str, Any]:
    return trainer.sample(prompts)


def _unpad(values: Tensor, mask: Tensor) -> list[list[Any]]:
    return [row[kept].tolist() for row, kept in zip(values, mask.bool(), strict=True)]


def _sampling_params(args: GRPOConfig, *, stop_token_ids: Sequence[int]) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=stop_token_ids,
    )


def _check(kwargs: Mapping[str, Any], correction: CorrectionConfig) -> None:
    args = kwargs.get("args")
    faults = [
        f"{name} is given; the session generates" if name == "rollout_func" else f"{name} is given"
        for name in ("rollout_func", "tools", "environment_factory")
        if kwargs.get(name)
    ]
    faults += [
        f"args.{name} is {getattr(args, name)!r}; {why}"
        for name, wanted, why in (
            ("use_vllm", False, "the session generates"),
            ("use_transformers_continuous_batching", False, "the session generates"),
            ("generation_kwargs", None, "use the arguments of their own, such as args.top_p"),
        )
        if args is not None and getattr(args, name) != wanted
    ]
    if args is not None and args.loss_type == "vespo":
        faults.append("args.loss_type is 'vespo', which weighs whole sequences in its own way")
    if correction.objective != "decoupled" or correction.denominator != "fixed":
        faults.append(
            f"correction {correction.name!r} has objective {correction.objective!r} and "
            f"denominator {correction.denominator!r}; TRL's loss allows 'decoupled' and 'fixed'"
        )
    if faults:
        raise ConfigError("SessionGRPOTrainer: " + "; ".join(faults))
