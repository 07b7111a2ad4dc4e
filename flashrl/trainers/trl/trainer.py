"""TRL's GRPO trainer with rollouts from a session, and the correction that goes with them.

TRL corrects only what its own vLLM generated.  Here completions come from any engine that a
:class:`flashrl.Session` holds, through TRL's ``rollout_func``.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashrl.core.correction import CorrectionConfig
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.errors import ConfigError
from flashrl.session import Session
from flashrl.trainers.trl.batches import log_value
from flashrl.trainers.trl.corrected import CorrectedGRPOTrainer

__all__ = ["SessionGRPOTrainer"]


class SessionGRPOTrainer(CorrectedGRPOTrainer):
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
        self._rollout: Rollout | None = None
        self._pushed_step: int | None = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
            super().__init__(correction=correction, **{"rollout_func": _sample, **kwargs})
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"the session belongs to one process, and {self.accelerator.num_processes} train; "
                "use TRL's own vLLM generation with FLASHRL_CONFIG for more"
            )
        self.sampling_params = _sampling_params(
            self.args, stop_token_ids=stop_token_ids or self.eos_token_ids
        )

    def _find_faults(self, kwargs: Mapping[str, Any]) -> list[str]:
        args = kwargs.get("args")
        faults = [
            f"{name} is given; the session generates"
            for name in ("rollout_func", "tools", "environment_factory")
            if kwargs.get(name) and kwargs[name] is not _sample
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
        return faults + super()._find_faults(kwargs)

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
            log_value(self, "version_lag", self.state.global_step - self._rollout.version)
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """TRL's log, and the scheme's name."""
        if "tensorboard" not in self.args.report_to:  # it takes numbers only, and would complain
            logs["flashrl/scheme"] = self.session.scheme.name
        super().log(logs, start_time)

    def _log_milliseconds(self, name: str, started: float) -> None:
        log_value(self, name, 1000 * (time.perf_counter() - started))


def _sample(prompts: list[Any], trainer: SessionGRPOTrainer) -> dict[str, Any]:
    return trainer.sample(prompts)


def _unpad(values: Tensor, mask: Tensor) -> list[list[Any]]:
    return [row[kept].tolist() for row, kept in zip(values, mask.bool(), strict=True)]


def _sampling_params(args: Any, *, stop_token_ids: Sequence[int]) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=stop_token_ids,
    )
