"""Log-probabilities of sampled tokens, a block of positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flashrl.core.log_probs.penalties import TokenHistory, check_token_ids
from flashrl.core.log_probs.sampling import (
    adjust_logits,
    check_log_probs_finite,
    compute_log_mass,
    truncate_logits,
)
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import ConfigError, ShapeError

__all__ = ["LogProbs", "compute_log_probs", "compute_log_probs_from_hidden"]


class LogProbs(NamedTuple):
    """What sampled tokens were worth, both in nats and of the tokens' shape."""

    log_probs: torch.Tensor
    """log μ; -inf for a token that the sampling parameters rule out."""
    log_mass: torch.Tensor
    """log S, the log of the probability that survived truncation; 0 where nothing was removed."""


def compute_log_probs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    params: SamplingParams | None = None,
    response_mask: torch.Tensor | None = None,
    prompt_ids: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    num_valid_tokens: int | None = None,
    chunk_size: int = 512,
) -> LogProbs:
    """Score tokens by the logits that predicted them.

    Args:
        logits: Row t predicts token t (already shifted), any float dtype,
            (batch, response_length, vocab); also (batch, vocab) for one step, or (vocab,).
        token_ids: Sampled tokens, an integer dtype, of the logits' leading shape.
        params: How the tokens were drawn; None is temperature 1 and nothing else.
        response_mask: 0 at positions to skip: they get 0.0, take no part in penalties, and may
            hold anything.  Of the tokens' shape; None scores all.
        prompt_ids: Prompts, needed for the repetition penalty, (batch, prompt_length).
        prompt_mask: 0 at the prompts' padding, (batch, prompt_length).
        num_valid_tokens: Ids from here on could not be drawn; None allows all.
        chunk_size: Rows of logits to process at once.

    Returns:
        log μ and log S, float32, of the tokens' shape, differentiable in the logits.

    Raises:
        ShapeError: Shapes, dtypes or devices disagree.
        RolloutError: A token lies outside the vocabulary.
        NonFiniteError: A row of logits holds NaN or +inf, or rules out every token.
        ConfigError: ``params`` need the prompts and they are missing, or do not fit the vocabulary.

    Example:
        >>> logits, token = torch.tensor([2.0, 1.0, 0.0]), torch.tensor(0)
        >>> compute_log_probs(logits, token, params=SamplingParams(temperature=0.5)).log_probs
        tensor(-0.1429)
    """
    return _compute(
        logits,
        token_ids,
        head=None,
        vocab_size=logits.shape[-1],
        params=params or SamplingParams(),
        response_mask=response_mask,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        num_valid_tokens=num_valid_tokens,
        chunk_size=chunk_size,
    )


def compute_log_probs_from_hidden(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    lm_head_dtype: torch.dtype | None = None,
    params: SamplingParams | None = None,
    response_mask: torch.Tensor | None = None,
    prompt_ids: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    num_valid_tokens: int | None = None,
    chunk_size: int = 512,
) -> LogProbs:
    """Score tokens by the hidden states that predicted them; the full logits never exist.

    Logits live a block at a time, in the backward pass too, where they are computed anew.  For a
    model whose logits are more than a linear map of the hidden states (soft-capped, scaled), use
    :func:`compute_log_probs`.

    Args:
        hidden_states: What the lm_head would take, already shifted, any float dtype,
            (batch, response_length, hidden_size); also (batch, hidden_size), or (hidden_size,).
        lm_head_weight: (vocab, hidden_size).
        token_ids: Sampled tokens, an integer dtype, of the hidden states' leading shape.
        bias: The lm_head's, (vocab,).
        lm_head_dtype: Precision of the product, whatever autocast says: ``torch.float32`` for an
            fp32 lm_head.  None is the weight's own, or autocast's.
        params: How the tokens were drawn; None is temperature 1 and nothing else.
        response_mask: 0 at positions to skip, as in :func:`compute_log_probs`.
        prompt_ids: Prompts, needed for the repetition penalty, (batch, prompt_length).
        prompt_mask: 0 at the prompts' padding, (batch, prompt_length).
        num_valid_tokens: Ids from here on could not be drawn; None allows all.
        chunk_size: Rows of logits to process at once.

    Returns:
        log μ and log S, float32, of the tokens' shape, differentiable in the hidden states, the
        weight and the bias.

    Raises:
        ShapeError, RolloutError, NonFiniteError, ConfigError: As :func:`compute_log_probs`.

    Example:
        >>> hidden, weight = torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 5.0], [1.0, 5.0]])
        >>> compute_log_probs_from_hidden(hidden, weight, torch.tensor(0)).log_probs
        tensor(-0.3133)
    """
    if lm_head_weight.ndim != 2 or lm_head_weight.shape[1] != hidden_states.shape[-1]:
        raise ShapeError(
            f"lm_head_weight has shape {tuple(lm_head_weight.shape)}, hidden_states "
            f"{tuple(hidden_states.shape)}; allowed: (vocab, hidden_size), (..., hidden_size)"
        )
    dtype = lm_head_dtype or lm_head_weight.dtype
    weight = lm_head_weight.to(dtype)
    offset = None if bias is None else bias.to(dtype)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        if lm_head_dtype is None:
            return F.linear(hidden.to(dtype), weight, offset)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(dtype), weight, offset)

    return _compute(
        hidden_states,
        token_ids,
        head=head,
        vocab_size=len(lm_head_weight),
        params=params or SamplingParams(),
        response_mask=response_mask,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        num_valid_tokens=num_valid_tokens,
        chunk_size=chunk_size,
    )


def _compute(
    features: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    head: Callable[[torch.Tensor], torch.Tensor] | None,
    vocab_size: int,
    params: SamplingParams,
    response_mask: torch.Tensor | None,
    prompt_ids: torch.Tensor | None,
    prompt_mask: torch.Tensor | None,
    num_valid_tokens: int | None,
    chunk_size: int,
) -> LogProbs:
    """Score blocks of (sequences, positions); ``head`` turns features into logits."""
    shape = token_ids.shape
    if features.shape[:-1] != shape:
        raise ShapeError(
            f"token_ids has shape {tuple(shape)}, and what predicts them {tuple(features.shape)}; "
            "one row a token, shifted so that row t predicts token t"
        )
    for name, tensor in (
        ("token_ids", token_ids),
        ("response_mask", response_mask),
        ("prompt_ids", prompt_ids),
        ("prompt_mask", prompt_mask),
    ):
        if tensor is not None and tensor.device != features.device:
            raise ShapeError(
                f"{name} is on {tensor.device}, and what predicts the tokens on {features.device}; "
                "both must be on one device"
            )
    if chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}; allowed: at least 1")
    token_ids = check_token_ids(
        token_ids, mask=response_mask, vocab_size=vocab_size, name="token_ids"
    )
    if token_ids.numel() == 0:
        nothing = torch.zeros(shape, device=features.device)
        return LogProbs(nothing, nothing.clone())
    # Lone rows are sequences of one token.
    token_ids = token_ids.reshape(-1, shape[-1] if len(shape) > 1 else 1)
    batch, length = token_ids.shape
    features = features.reshape(batch, length, -1)
    mask = torch.ones_like(token_ids) if response_mask is None else response_mask
    mask = mask.reshape(batch, length) != 0
    history = _start_history(params, prompt_ids, prompt_mask, batch, vocab_size, features.device)

    def score(
        block: torch.Tensor, rows: slice, columns: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, wanted, seen = token_ids[rows, columns], mask[rows, columns], None
        if history is not None:
            seen = _seen_before(history[rows], token_ids[rows], mask[rows], columns)[wanted]
        if response_mask is None:
            block, ids = block.flatten(0, 1), ids.flatten()
        else:  # what is skipped costs nothing, and its gradient is 0 even if it holds NaN
            block, ids = block[wanted], ids[wanted]
        logits = block if head is None else head(block)
        adjusted = adjust_logits(logits, params, history=seen, num_valid_tokens=num_valid_tokens)
        truncated = truncate_logits(adjusted, params)
        log_probs = truncated.log_softmax(-1)
        log_mass = compute_log_mass(adjusted, truncated, log_probs)
        chosen = log_probs.gather(-1, ids[:, None]).squeeze(-1)
        if response_mask is None:
            return chosen, log_mass
        blank, wanted = chosen.new_zeros(wanted.numel()), wanted.flatten()
        return blank.masked_scatter(wanted, chosen), blank.masked_scatter(wanted, log_mass)

    # A block is some whole sequences or a part of one, so that one follows another in memory.
    num_columns = min(length, chunk_size)
    num_rows = max(1, chunk_size // num_columns)
    scores = []
    # split, not slices: its backward joins the pieces once instead of padding each to full size.
    for top, band in zip(range(0, batch, num_rows), torch.split(features, num_rows), strict=True):
        rows, pieces = slice(top, top + num_rows), torch.split(band, num_columns, dim=1)
        for left, block in zip(range(0, length, num_columns), pieces, strict=True):
            columns = slice(left, left + num_columns)
            if torch.is_grad_enabled():
                scores.append(checkpoint(score, block, rows, columns, use_reentrant=False))
            else:
                scores.append(score(block, rows, columns))
    log_probs, log_mass = (torch.cat(parts).reshape(shape) for parts in zip(*scores, strict=True))
    return LogProbs(check_log_probs_finite(log_probs), log_mass)


def _start_history(
    params: SamplingParams,
    prompt_ids: torch.Tensor | None,
    prompt_mask: torch.Tensor | None,
    batch: int,
    vocab_size: int,
    device: torch.device,
) -> TokenHistory | None:
    """The prompts' part of the history, if a penalty needs any."""
    if not params.penalizes:
        return None
    if prompt_ids is None:
        if params.repetition_penalty != 1.0:
            raise ConfigError(
                f"repetition_penalty is {params.repetition_penalty}, which counts prompt tokens "
                "too; pass prompt_ids (and prompt_mask if they are padded)"
            )
        prompt_ids = torch.empty(batch, 0, dtype=torch.int64, device=device)
    if len(prompt_ids) != batch:
        raise ShapeError(f"{len(prompt_ids)} prompts for {batch} responses; one a response")
    return TokenHistory.start(prompt_ids, vocab_size=vocab_size, prompt_mask=prompt_mask)


def _seen_before(
    history: TokenHistory, token_ids: torch.Tensor, mask: torch.Tensor, columns: slice
) -> TokenHistory:
    """What was seen before each of some positions, given the prompts' history."""
    earlier = slice(0, columns.start)
    history = TokenHistory(in_prompt=history.in_prompt, counts=history.counts.clone())
    history.append(token_ids[:, earlier], mask[:, earlier])
    return history.prefixes(token_ids[:, columns], mask[:, columns])
