"""Generation with transformers' own ``generate``; FlashRL draws the tokens, so that it knows μ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashrl.core.log_probs.penalties import TokenHistory
from flashrl.core.log_probs.sampling import sample
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.errors import ShapeError

__all__ = ["generate"]


class _Draw:
    """A logits processor that draws the token itself and leaves ``generate`` no choice.

    So the log-probability is that of the very draw, and the draw repeats under a seed.
    """

    def __init__(self, params: SamplingParams, prompt_mask: Tensor) -> None:
        self.params = params
        self.prompt_mask = prompt_mask
        self.history: TokenHistory | None = None
        self.log_probs: list[Tensor] = []
        self.log_mass: list[Tensor] = []
        self.generator: torch.Generator | None = None
        if params.seed is not None:
            self.generator = torch.Generator(prompt_mask.device).manual_seed(params.seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw from (batch, vocab) logits; return logits whose argmax is the draw."""
        if self.params.penalizes and self.history is None:
            self.history = TokenHistory.start(
                input_ids, vocab_size=scores.shape[1], prompt_mask=self.prompt_mask
            )
        drawn = sample(scores, self.params, self.generator, history=self.history)
        if self.history is not None:
            self.history.append(drawn.token_ids)
        self.log_probs.append(drawn.log_probs)
        self.log_mass.append(drawn.log_mass)
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter_(1, drawn.token_ids[:, None], 0.0)


@torch.inference_mode()
def generate(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    version: int | None = None,
) -> Rollout:
    """Sample one response for each prompt, batched.

    Args:
        model: A transformers causal language model.
        prompt_ids: Token ids of each prompt; no padding.
        params: How to sample.  Without ``stop_token_ids`` the model's own end-of-sequence stops.
        version: Stamped on the rollout.

    Returns:
        Right-padded responses; the token that stopped a response is part of it.

    Raises:
        ShapeError: A prompt is empty, or there is none.
    """
    if not prompt_ids or not all(len(prompt) for prompt in prompt_ids):
        raise ShapeError("prompt_ids must hold at least one prompt, and no empty one")
    stops = list(params.stop_token_ids or _end_of_sequence(model))
    pad = stops[0] if stops else 0
    input_ids, prompt_mask = _pad_left(prompt_ids, pad, device=model.device)
    draw = _Draw(params, prompt_mask)
    with _clean_defaults(model, was_training=model.training):
        sequences = model.generate(
            inputs=input_ids,
            attention_mask=prompt_mask,
            logits_processor=[draw],
            max_new_tokens=params.max_tokens,
            do_sample=False,
            eos_token_id=stops or None,
            pad_token_id=pad,
        )
    response_ids = sequences[:, input_ids.shape[1] :]
    response_mask = _mask_after_stop(response_ids, stops)
    return Rollout(
        response_ids=response_ids.masked_fill(~response_mask, pad),
        response_mask=response_mask.long(),
        rollout_log_probs=_stack(draw.log_probs, response_mask),
        log_mass=_stack(draw.log_mass, response_mask),
        version=version,
    )


def _end_of_sequence(model: Any) -> list[int]:
    configured = model.generation_config.eos_token_id
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)


def _pad_left(
    prompt_ids: Sequence[Sequence[int]], pad: int, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompt_ids))
    ids = torch.full((len(prompt_ids), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompt_ids):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.long)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _mask_after_stop(response_ids: Tensor, stops: list[int]) -> Tensor:
    """True up to and including the first stop token of each row."""
    stopped = torch.isin(response_ids, torch.tensor(stops, device=response_ids.device))
    return (stopped.cumsum(1) - stopped.long()) == 0


def _stack(columns: list[Tensor], mask: Tensor) -> Tensor:
    return torch.stack(columns, dim=1).masked_fill(~mask, 0.0)


@contextmanager
def _clean_defaults(model: Any, *, was_training: bool) -> Iterator[None]:
    """Keep the checkpoint's own generation defaults (a repetition penalty, say) out of μ."""
    defaults = model.generation_config
    model.generation_config = type(defaults)()
    model.eval()
    try:
        yield
    finally:
        model.generation_config = defaults
        model.train(was_training)
