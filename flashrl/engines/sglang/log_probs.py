"""Requests to SGLang, and the log-probabilities of the distribution that it really sampled.

SGLang reports the log-softmax of the logits over the temperature, penalties and bias included, from
before top-k, top-p and min-p.  That is μ where none of these is on.  Where one is, newer versions
report the log-probability within the surviving support too (``return_sampling_mask``); older ones
do not, and the request is refused.

With its overlapped schedule, the default, SGLang applies a penalty one token late and counts the
last token of the prompt in its place.  What it reports is still the distribution that it sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.errors import RolloutError, ShapeError, UnsupportedError

__all__ = ["build_request", "build_rollout", "check_exact", "needs_support"]


def needs_support(params: SamplingParams) -> bool:
    """Whether tokens can be removed, so that what SGLang reports by default is not μ."""
    return params.truncates and params.top_k != 1


def check_exact(params: SamplingParams, exact: frozenset[str], *, most: int, vocab: int) -> None:
    """Refuse parameters under which the log-probability would not be exact.

    Args:
        params: How to sample.
        exact: Parameters that are exact in this engine.
        most: The largest support that the engine reports.
        vocab: The vocabulary's size.

    Raises:
        UnsupportedError: Says which parameter, why, and what works instead.
    """
    active = {
        "temperature": params.temperature not in (0.0, 1.0),
        "top_k": params.top_k > 1 and not params.greedy,
        "top_p": params.top_p < 1.0 and needs_support(params),
        "min_p": params.min_p > 0.0 and needs_support(params),
    }
    inexact = sorted(name for name, on in active.items() if on and name not in exact)
    if inexact:
        raise UnsupportedError(
            f"this engine does not report exact log-probabilities under {', '.join(inexact)}; "
            f"exact are: {', '.join(sorted(exact))}. Sample with temperature alone, or use "
            "SGLang 0.5.20 or newer without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    if needs_support(params) and (params.top_k or vocab) > most:
        raise UnsupportedError(
            f"SGLang reports the support of top-p and min-p only up to {most} tokens; set top_k "
            f"to at most {most}, or start the engine with sampling_mask_max_tokens={vocab}"
        )


def build_request(params: SamplingParams, *, vocab: int) -> dict[str, Any]:
    """Sampling parameters as SGLang takes them."""
    top_k = params.top_k or -1
    if needs_support(params) and top_k == -1:
        top_k = vocab  # all of them; SGLang wants a number to report the support
    request: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }
    if params.logit_bias:
        request["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.stop_token_ids:
        request["stop_token_ids"] = list(params.stop_token_ids)
    if params.seed is not None:
        request["sampling_seed"] = params.seed
    return request


def build_rollout(
    answers: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    version: int | None,
    pad_token_id: int = 0,
) -> Rollout:
    """Put SGLang's answers side by side.

    Raises:
        RolloutError: An answer has not one log-probability for each token.
    """
    responses = [list(answer["output_ids"]) for answer in answers]
    tempered = [_tempered_of(answer, len(r)) for answer, r in zip(answers, responses, strict=True)]
    sampled = tempered
    if params.top_k == 1 and not params.greedy:
        sampled = [[0.0] * len(response) for response in responses]
    elif needs_support(params):
        sampled = [
            _checked(answer["meta_info"].get("output_token_sampling_logprobs"), len(response))
            for answer, response in zip(answers, responses, strict=True)
        ]
    ids = _pad(responses, torch.int64, pad_token_id)
    mask = _pad([[1] * len(response) for response in responses], torch.int64, 0)
    log_probs = _pad(sampled, torch.float32, 0.0)
    # Truncation raises a surviving token's log-probability by -log S.
    log_mass = (_pad(tempered, torch.float32, 0.0) - log_probs).clamp(max=0.0)
    return Rollout(
        response_ids=ids,
        response_mask=mask,
        rollout_log_probs=log_probs,
        log_mass=log_mass if params.truncates else torch.zeros_like(log_probs),
        version=version,
    )


def check_prompts(prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts as plain lists.

    Raises:
        ShapeError: A prompt is empty, or there is none.
    """
    prompts = [[int(token) for token in prompt] for prompt in prompt_ids]
    if not prompts or not all(prompts):
        raise ShapeError("prompt_ids must hold at least one prompt, and no empty one")
    return prompts


def _tempered_of(answer: Mapping[str, Any], length: int) -> list[float]:
    entries = answer["meta_info"].get("output_token_logprobs")
    return _checked(None if entries is None else [entry[0] for entry in entries], length)


def _checked(values: Sequence[float | None] | None, length: int) -> list[float]:
    found = [value for value in values or () if value is not None]
    if len(found) != length:
        raise RolloutError(
            f"SGLang returned {len(found)} log-probabilities for {length} tokens; "
            "a missing one is never taken as 0"
        )
    return found


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, value: float) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor(
        [[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype
    ).reshape(len(rows), width)
