"""What is added to TRL's own trainer, and where: the one table of everything changed in it.

With ``use_vllm`` in colocate mode vLLM runs in the process that trains, and calls
:func:`register` there, so that a script needs FLASHRL_CONFIG and nothing else.  TRL corrects by
itself; what is added are guards before that and metrics behind it.  Written for TRL 1.16.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from flashrl.core.config import load_config
from flashrl.core.schemes import QuantScheme
from flashrl.trainers import guards
from flashrl.trainers.metrics import PREFIX, measure_correction, scheme_metrics
from flashrl.trainers.patches import Patches, Plugin
from flashrl.trainers.trl.batches import log_metrics, log_value, loss_mask
from flashrl.trainers.trl.options import read_options

__all__ = ["PLUGIN", "install", "register", "uninstall"]

_Method = Callable[..., Any]


def _extend_trainer(patches: Patches, module: Any) -> None:
    """Guard what vLLM reports, measure the mismatch."""
    cls = module.GRPOTrainer
    for name, changed in (
        ("_generate", guarded),
        ("_generate_and_score_completions", measured),
        ("_compute_loss", with_lag),
    ):
        patches.replace(cls, name, changed(getattr(cls, name)))


def _time_sync(patches: Patches, module: Any) -> None:
    """Time the sync."""
    cls = module.VLLMGeneration
    patches.replace(cls, "sync_weights", timed(cls.sync_weights))


PLUGIN = Plugin(
    {
        "trl.trainer.grpo_trainer": _extend_trainer,
        "trl.generation.vllm_generation": _time_sync,
    }
)
install, uninstall = PLUGIN.install, PLUGIN.uninstall


def register() -> None:
    """Called by vLLM in each of its processes; does something where FLASHRL_CONFIG is set."""
    if load_config() is not None:
        install()


def guarded(generate: _Method) -> _Method:
    """``_generate`` of a trainer; then unusable tokens count as ones that were not sampled.

    TRL takes a log-probability that vLLM did not report for a ratio of 1.  Here the token is no
    part of the loss; ``tool_mask`` is where TRL itself marks such tokens.
    """

    @functools.wraps(generate)
    def with_guard(self: Any, prompts: list[Any]) -> Any:
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *others = generate(
            self, prompts
        )
        if self.use_vllm:
            _check_once(self)
            tool_mask, log_probs, num_unusable = mask_unusable(completion_ids, tool_mask, log_probs)
            log_value(self, "num_unusable", num_unusable)
        return prompt_ids, completion_ids, tool_mask, completions, log_probs, *others

    return with_guard


def mask_unusable(
    completion_ids: list[list[int]],
    tool_mask: list[list[int]] | None,
    log_probs: list[list[float | None]] | None,
) -> tuple[list[list[int]] | None, list[list[float]], int]:
    """Mask out tokens whose log-probability cannot be used.

    Args:
        completion_ids: Token ids of each completion.
        tool_mask: TRL's mask of each, 0 where a tool has spoken; None for ones.
        log_probs: What vLLM reported for each.

    Returns:
        The mask, None if everything counts; the log-probabilities, with a stand-in where one is
        masked out; and how many tokens that are.

    Raises:
        RolloutError: There are none, or not one for each token.
    """
    lengths = list(map(len, completion_ids))
    masks = tool_mask or [[1] * length for length in lengths]
    found = guards.screen(
        None if log_probs is None else guards.pad_rows(log_probs, lengths=lengths),
        response_mask=guards.pad_rows(masks, lengths=lengths),
    )
    if not found.num_unusable:
        assert log_probs is not None  # screen has raised otherwise
        return tool_mask, log_probs, 0  # type: ignore[return-value]  # none of them is None
    kept = [
        list(map(int, row[:length]))
        for row, length in zip(found.response_mask.tolist(), lengths, strict=True)
    ]
    usable = [
        row[:length] for row, length in zip(found.rollout_log_probs.tolist(), lengths, strict=True)
    ]
    return kept, usable, found.num_unusable


def _check_once(trainer: Any) -> None:
    """What a run is told at its start; each is said once."""
    args = trainer.args
    corrected = args.vllm_importance_sampling_correction or hasattr(trainer, "correction")
    guards.check_correction(
        _schemes(), corrected=corrected, remedy="vllm_importance_sampling_correction=True"
    )
    config = trainer.accelerator.unwrap_model(trainer.model).config
    guards.check_vocabulary(
        config.get_text_config().vocab_size, num_tokens=len(trainer._tokenizer), masked=False
    )


def _schemes() -> list[QuantScheme]:
    """What vLLM generates with: the first entry of FLASHRL_CONFIG, for each engine has rank 0."""
    config = load_config()
    return [] if config is None else [config.for_rank(0).quant_scheme]


def measured(generate_and_score: _Method) -> _Method:
    """``_generate_and_score_completions`` of a trainer, and our metrics of the same batch.

    A trainer with a correction of ours measures itself; where TRL computes no log π, which is so
    with its correction off, there is nothing to measure.
    """

    @functools.wraps(generate_and_score)
    def with_metrics(self: Any, inputs: Any) -> Any:
        batch = generate_and_score(self, inputs)
        names = ("old_per_token_logps", "sampling_per_token_logps")
        if self.use_vllm and not hasattr(self, "correction") and all(n in batch for n in names):
            _, metrics = measure_correction(
                old_log_probs=batch["old_per_token_logps"],
                rollout_log_probs=batch["sampling_per_token_logps"],
                response_mask=loss_mask(batch),
                advantages=batch["advantages"],
                correction=read_options(self.args),
            )
            log_metrics(self, metrics)
        if self.use_vllm:
            for name, share in scheme_metrics(_schemes()).items():
                log_value(self, name.removeprefix(PREFIX), share)
            update_ms = self.vllm_generation.__dict__.pop("flashrl_update_ms", None)
            if update_ms is not None:
                log_value(self, "update_ms", update_ms)
        return batch

    return with_metrics


def with_lag(compute_loss: _Method) -> _Method:
    """``_compute_loss`` of a trainer; also notes how old the weights are that sampled the batch."""

    @functools.wraps(compute_loss)
    def with_metric(self: Any, model: Any, inputs: Any) -> Any:
        if self.use_vllm:
            log_value(self, "version_lag", self.state.global_step - self._last_loaded_step)
        return compute_loss(self, model, inputs)

    return with_metric


def timed(sync_weights: _Method) -> _Method:
    """``sync_weights``, which notes its milliseconds."""

    @functools.wraps(sync_weights)
    def with_time(self: Any) -> None:
        started = time.perf_counter()
        sync_weights(self)
        self.flashrl_update_ms = 1000 * (time.perf_counter() - started)

    return with_time
