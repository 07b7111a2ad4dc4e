"""Sampling with vLLM: how to ask for exact log-probabilities, and how to take them out.

vLLM's ``processed_logprobs`` are those of the distribution a token is drawn from, after logit bias,
penalties, temperature, min-p, top-k and top-p.  With ``logprobs=0`` it reports the sampled token's
alone, and with ``flat_logprobs`` without a dict and an object a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from flashrl.core.log_probs.assemble import assemble_rollout, pick_sampled_log_probs
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.errors import RolloutError, UnsupportedError

__all__ = ["EXACT", "extract_rollout", "native_sampling_params"]

EXACT = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    }
)
"""Sampling parameters under which what vLLM reports is exact."""

# vLLM raises lower temperatures to this, and cuts a bias to ±100, without an error.
_LOWEST_TEMPERATURE = 0.01
_LARGEST_BIAS = 100.0


def native_sampling_params(params: SamplingParams, *, index: int = 0, **native: Any) -> Any:
    """VLLM's own sampling parameters, with the sampled token's log-probability asked for.

    Args:
        params: How to sample.
        index: The prompt's place in the batch; a seed is counted up by it, so that equal prompts
            do not get equal draws.
        native: More of ``vllm.SamplingParams``' arguments, such as ``n`` or ``stop``.

    Returns:
        A ``vllm.SamplingParams``.

    Raises:
        UnsupportedError: vLLM would quietly sample from another distribution.
    """
    from vllm import SamplingParams as NativeSamplingParams

    if 0.0 < params.temperature < _LOWEST_TEMPERATURE:
        raise UnsupportedError(
            f"temperature {params.temperature}: vLLM samples at no less than "
            f"{_LOWEST_TEMPERATURE}; use 0 for greedy"
        )
    excess = {i: bias for i, bias in params.logit_bias.items() if abs(bias) > _LARGEST_BIAS}
    if excess:
        raise UnsupportedError(
            f"logit_bias {excess}: vLLM cuts a bias to ±{_LARGEST_BIAS:.0f}; use a value within"
        )
    arguments: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": bool(params.stop_token_ids),
        "seed": None if params.seed is None else params.seed + index,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
    return NativeSamplingParams(**{**arguments, **native})


def extract_rollout(
    outputs: Iterable[Any],
    *,
    params: SamplingParams | None = None,
    pad_token_id: int = 0,
    version: int | None = None,
) -> Rollout:
    """Line up what ``LLM.generate`` returned as one right-padded batch.

    Args:
        outputs: vLLM's ``RequestOutput``, one a prompt; several samples of a prompt follow each
            other.
        params: How they were sampled; says whether anything was truncated.
        pad_token_id: Token that fills the padding.
        version: The weight version that generated them.

    Returns:
        The batch; ``log_mass`` is None where top-k, top-p or min-p were on, since vLLM does not
        report it.

    Raises:
        RolloutError: A log-probability is missing or cannot be one.
    """
    completions = [completion for output in outputs for completion in output.outputs]
    rollout = assemble_rollout(
        [list(completion.token_ids) for completion in completions],
        [sampled_log_probs(completion) for completion in completions],
        pad_token_id=pad_token_id,
        version=version,
        allow_zeros=params is not None and (params.top_k == 1),
    )
    if params is None or params.truncates:
        return rollout
    return attrs.evolve(
        rollout, log_mass=rollout.rollout_log_probs.new_zeros(rollout.rollout_log_probs.shape)
    )


def sampled_log_probs(completion: Any) -> Sequence[float]:
    """The log-probability of each token of a completion, in nats.

    Raises:
        RolloutError: vLLM reported none; the message says how to ask.
    """
    reported, token_ids = completion.logprobs, list(completion.token_ids)
    if reported is None:
        raise RolloutError(
            "vLLM reported no log-probabilities: generate with logprobs=0, or with "
            "flashrl.engines.vllm.native_sampling_params(...)"
        )
    starts = getattr(reported, "start_indices", None)
    if starts is None:
        return pick_sampled_log_probs(reported, token_ids)
    if [reported.token_ids[start] for start in starts] != token_ids:
        raise RolloutError(
            "vLLM's flat log-probabilities do not begin each position with the sampled token"
        )
    return [reported.logprobs[start] for start in starts]
