"""The distribution that a token is really drawn from, and the draw.

The steps and their order are vLLM's (V1 sampler, read in 0.32):

1. ids past the tokenizer are ruled out (``num_valid_tokens``)
2. logit bias
3. repetition, then frequency, then presence penalty
4. temperature
5. min-p
6. top-k: a token that ties with the k-th stays, so more than k can survive
7. top-p, over what is left, renormalised: the most likely tokens until their mass reaches p; of
   tokens that tie, the one with the lower id comes first

At temperature 0 the choice is greedy and steps 4 to 7 do nothing.

Where others differ: SGLang (0.5.23) applies the penalties before the bias, counts only the response
for the repetition penalty, cuts top-k at exactly k and measures p against the mass before top-k.
Transformers (5.24) takes padding for part of the prompt and applies min-p last.  All break ties at
the edge of top-p as their sort happens to.  A token at an edge is therefore the one place where two
engines that agree on the logits can disagree on the support.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from flashrl.core.log_probs.penalties import TokenHistory
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import ConfigError, NonFiniteError, ShapeError

__all__ = [
    "Sample",
    "adjust_logits",
    "compute_log_mass",
    "process_logits",
    "sample",
    "truncate_logits",
]

# Float32 is no finer: a token that is needed for less than this part of its probability is not.
_EDGE_TOLERANCE = 2e-6


class Sample(NamedTuple):
    """One drawn token a sequence, each (batch,)."""

    token_ids: torch.Tensor
    """int64."""
    log_probs: torch.Tensor
    """log μ of the drawn token in nats, float32."""
    log_mass: torch.Tensor
    """log S, the log of the probability that survived truncation, float32; 0 without truncation."""


def adjust_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    history: TokenHistory | None = None,
    num_valid_tokens: int | None = None,
) -> torch.Tensor:
    """Everything before truncation: valid ids, logit bias, penalties, temperature.

    Args:
        logits: The model's own, any float dtype, (..., vocab).
        params: How the token is drawn.
        history: What each sequence has seen; needed when a penalty is on.
        num_valid_tokens: Ids from here on can not be drawn (a vocabulary padded past the
            tokenizer); None allows all.

    Returns:
        Float32 logits (float64 stays), (..., vocab); the input itself if nothing is on.

    Raises:
        ConfigError: A penalty is on and there is no history, or the bias names an id that is not
            in the vocabulary.
        ShapeError: The history is of other sequences or another vocabulary.
    """
    vocab_size = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_valid_tokens is not None and num_valid_tokens != vocab_size:
        if not 0 < num_valid_tokens < vocab_size:
            raise ConfigError(
                f"num_valid_tokens is {num_valid_tokens}; allowed: 1 to {vocab_size}, the width of "
                "the logits"
            )
        padding = (0, vocab_size - num_valid_tokens)
        logits = F.pad(logits[..., :num_valid_tokens], padding, value=-math.inf)
    if params.logit_bias:
        logits = logits + _dense_bias(params, logits)
    if params.penalizes:
        if history is None:
            raise ConfigError(
                "a repetition, presence or frequency penalty is on, and no history was given; "
                "pass history=TokenHistory.start(prompt_ids, vocab_size=...)"
            )
        if history.counts.shape != logits.shape:
            raise ShapeError(
                f"history is of shape {tuple(history.counts.shape)}, logits {tuple(logits.shape)}; "
                "both must be (batch, vocab)"
            )
        logits = history.penalize(logits, params)
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    return logits


def truncate_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Min-p, top-k and top-p: removed tokens become -inf.

    Sources: top-k, Fan et al. 2018 (arXiv:1805.04833); top-p, Holtzman et al. 2019
    (arXiv:1904.09751); min-p, Nguyen et al. 2024 (arXiv:2407.01082).

    Args:
        logits: What :func:`adjust_logits` returned, (..., vocab).
        params: How the token is drawn.

    Returns:
        The logits with the same gradient where they survive; the input itself if nothing is on.

    Example:
        >>> truncate_logits(torch.tensor([3.0, 1.0, 2.0, 2.0]), SamplingParams(top_k=2))
        tensor([3., -inf, 2., 2.])
    """
    if not params.truncates or logits.numel() == 0:
        return logits
    with torch.no_grad():
        kept = logits.detach()
        if params.min_p > 0.0:
            floor = kept.amax(-1, keepdim=True) + math.log(params.min_p)
            kept = kept.masked_fill(kept < floor, -math.inf)
        if 0 < params.top_k < logits.shape[-1]:
            floor = kept.topk(params.top_k, dim=-1).values[..., -1:]
            kept = kept.masked_fill(kept < floor, -math.inf)
        removed = kept == -math.inf
        if params.top_p < 1.0:
            removed |= ~_top_p_support(kept.softmax(-1), params.top_p)
    return logits.masked_fill(removed, -math.inf)


def process_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    history: TokenHistory | None = None,
    num_valid_tokens: int | None = None,
) -> torch.Tensor:
    """Logits whose softmax is the distribution that is sampled; filtered tokens are -inf.

    At temperature 0 it is the untempered distribution, as vLLM reports it.

    Args:
        logits: The model's own, any float dtype, (..., vocab).
        params: How the token is drawn.
        history: What each sequence has seen; needed when a penalty is on.
        num_valid_tokens: Ids from here on can not be drawn; None allows all.

    Returns:
        Float32 (float64 stays), (..., vocab).

    Raises:
        ConfigError, ShapeError: As :func:`adjust_logits`.

    Example:
        >>> process_logits(torch.tensor([2.0, 1.0, 0.0]), SamplingParams(temperature=0.5, top_k=2))
        tensor([4., 2., -inf])
    """
    adjusted = adjust_logits(logits, params, history=history, num_valid_tokens=num_valid_tokens)
    return truncate_logits(adjusted, params)


def compute_log_mass(
    adjusted: torch.Tensor, truncated: torch.Tensor, log_probs: torch.Tensor
) -> torch.Tensor:
    """Log of the surviving mass S: how much probability truncation left.

    The most likely token always survives, and renormalising raises its log-probability by -log S.

    Args:
        adjusted: Logits before truncation, (..., vocab).
        truncated: The same after it.
        log_probs: Log-softmax of ``truncated``.

    Returns:
        At most 0, (...); exactly 0 when nothing could be removed.
    """
    if truncated is adjusted:
        return log_probs.new_zeros(log_probs.shape[:-1])
    return (adjusted.log_softmax(-1).amax(-1) - log_probs.amax(-1)).clamp(max=0.0)


@torch.no_grad()
def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    *,
    history: TokenHistory | None = None,
    num_valid_tokens: int | None = None,
) -> Sample:
    """Draw one token a sequence, with its log-probability under the distribution it came from.

    Args:
        logits: The model's own for the next position, any float dtype, (batch, vocab).
        params: How the token is drawn.
        generator: Source of randomness on the logits' device; the same state draws the same
            tokens.  None is torch's default.
        history: What each sequence has seen; needed when a penalty is on.  Not changed: append
            the drawn tokens to it.
        num_valid_tokens: Ids from here on can not be drawn; None allows all.

    Returns:
        Tokens, log-probabilities and surviving mass.

    Raises:
        ShapeError: The logits are not (batch, vocab).
        NonFiniteError: A row holds NaN or +inf, or nothing that can be drawn.
        ConfigError: As :func:`adjust_logits`.

    Example:
        >>> sample(torch.tensor([[2.0, 1.0, 0.0]]), SamplingParams(temperature=0.0)).token_ids
        tensor([0])
    """
    if logits.ndim != 2:
        raise ShapeError(f"logits has shape {tuple(logits.shape)}; allowed: (batch, vocab)")
    adjusted = adjust_logits(logits, params, history=history, num_valid_tokens=num_valid_tokens)
    truncated = truncate_logits(adjusted, params)
    log_probs = truncated.log_softmax(-1)
    if params.greedy:
        token_ids = truncated.argmax(-1, keepdim=True)  # log_softmax can round two into a tie
    else:
        # Inverse transform.  1 - rand lies in (0, 1], so the first id whose cumulative mass
        # reaches it always exists and never has probability 0.
        cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
        uniform = 1.0 - torch.rand(
            len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator
        )
        token_ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
        token_ids = token_ids.clamp(max=logits.shape[-1] - 1)  # only a NaN row exceeds it
    chosen = check_log_probs_finite(log_probs.gather(-1, token_ids).squeeze(-1))
    log_mass = compute_log_mass(adjusted, truncated, log_probs)
    return Sample(token_ids.squeeze(-1), chosen, log_mass)


def check_log_probs_finite(log_probs: torch.Tensor) -> torch.Tensor:
    """The log-probabilities themselves, or an error for the first that is NaN."""
    undefined = log_probs.isnan()
    if undefined.any():
        raise NonFiniteError(
            f"logits{undefined.nonzero()[0].tolist()} hold NaN or +inf, or rule out every token: "
            "no distribution can be made of them.  Look at the weights and activations before them"
        )
    return log_probs


def _dense_bias(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """The logit bias as a vector over the vocabulary."""
    vocab_size = logits.shape[-1]
    ids = list(params.logit_bias)
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"logit_bias names token {max(ids)}; the vocabulary has {vocab_size} (0 to "
            f"{vocab_size - 1})"
        )
    bias = torch.zeros(vocab_size, dtype=logits.dtype)
    bias[ids] = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    return bias.to(logits.device)


def _top_p_support(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens top-p keeps: those with less than p before them, most likely first."""
    # All tokens at or under (1 - p) / vocab together hold at most 1 - p, so none of them can be
    # kept: only the others need sorting, for a language model a few thousand instead of 150 000.
    candidates = (probs > (1.0 - top_p) / probs.shape[-1]).sum(-1).amax().clamp(min=1)
    values = probs.topk(int(candidates), dim=-1).values
    reached = values.cumsum(-1, dtype=torch.float64) - (1.0 - _EDGE_TOLERANCE) * values
    total = probs.sum(-1, keepdim=True, dtype=torch.float64)  # 1, but for float32's rounding
    num_kept = (reached < top_p * total).sum(-1, keepdim=True).clamp(min=1)
    edge = values.gather(-1, num_kept - 1)
    support = probs >= edge
    num_excess = support.sum(-1, keepdim=True) - num_kept
    if num_excess.any():  # of the tokens that tie at the edge, those with the highest ids go
        tied = probs == edge
        rank = tied.cumsum(-1)
        support &= ~(tied & (rank > rank[..., -1:] - num_excess))
    return support
