"""From what an engine hands over to an aligned rollout, or to an error that says what is wrong.

Engines report lists: ragged, padded on one side or the other, with candidates beside the sampled
token, with gaps.  A gap is an error.  It is never filled in: 0.0 would mean "certain", and the
importance weight of that token would be off by its whole probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from flashrl.core.rollouts import Rollout
from flashrl.errors import NonFiniteError, RolloutError, ShapeError

__all__ = ["assemble_rollout", "check_rollout_log_probs", "pick_sampled_log_probs"]

# log of the smallest float32: no engine that samples in float32 can draw anything rarer, so a
# value below it is a stand-in such as -9999 or the lowest float.
_LOWEST_LOG_PROB = math.log(2.0**-149)
# A softmax in float32 can round a certain token to just above 1.
_POSITIVE_TOLERANCE = 1e-5


def check_rollout_log_probs(
    rollout_log_probs: torch.Tensor | Sequence[Sequence[float | None]] | None,
    *,
    response_mask: torch.Tensor,
    allow_zeros: bool = False,
) -> torch.Tensor:
    """Check what an engine reported, before anything is computed from it.

    Args:
        rollout_log_probs: Log-probabilities of the sampled tokens in nats,
            (batch, response_length), a tensor or nested lists; outside the mask anything goes.
        response_mask: 1 where a token was sampled, (batch, response_length).
        allow_zeros: Accept a response in which every value is exactly 0.0.  Right only where each
            support is a single token (``top_k=1``), or the policy is certain to float32 precision.

    Returns:
        The values in float32 with 0 outside the mask, on the mask's device.

    Raises:
        ShapeError: The values do not line up with the mask.
        NonFiniteError: A sampled token has NaN or infinity.
        RolloutError: A value is missing, positive, a stand-in such as -9999, or 0.0 throughout a
            response, as if filled in.

    Example:
        >>> mask = torch.tensor([[1, 1, 0]])
        >>> check_rollout_log_probs([[-0.5, -1.0, None]], response_mask=mask)
        tensor([[-0.5000, -1.0000,  0.0000]])
    """
    if rollout_log_probs is None:
        raise RolloutError(
            "rollout_log_probs is None: the engine reported no log-probabilities; ask it for those "
            "of the sampled tokens"
        )
    mask = response_mask != 0
    if isinstance(rollout_log_probs, torch.Tensor):
        values = rollout_log_probs.detach().to(mask.device, torch.float32)
    else:
        rows = _rows("rollout_log_probs", rollout_log_probs)
        _check_lengths("rollout_log_probs", rows, "response_mask", mask.tolist())
        values = _tensor("rollout_log_probs", rows, torch.float32).to(mask.device)
    if values.shape != mask.shape:
        raise ShapeError(
            f"rollout_log_probs has shape {tuple(values.shape)}, response_mask "
            f"{tuple(mask.shape)}; one value a token: never pad or cut to fit"
        )
    _reject_non_finite("rollout_log_probs", values, mask)
    for bad, why in (
        (values > _POSITIVE_TOLERANCE, "a log-probability is at most 0"),
        (values < _LOWEST_LOG_PROB, "nothing that rare is drawn in float32; is it a stand-in?"),
    ):
        if (bad & mask).any():
            raise RolloutError(f"{_first('rollout_log_probs', values, bad & mask)}; {why}")
    filled = mask.any(-1) & ((values == 0) | ~mask).all(-1)
    if filled.any() and not allow_zeros:
        raise RolloutError(
            f"rollout_log_probs[{int(filled.nonzero()[0])}] is 0.0 at every sampled token, as if "
            "missing values had been filled in; report real ones, or pass allow_zeros=True if "
            "every token was certain"
        )
    return values.clamp(max=0.0).masked_fill(~mask, 0.0)


def pick_sampled_log_probs(
    candidates: Sequence[Mapping[int, Any] | None], token_ids: Sequence[int]
) -> list[float]:
    """The sampled tokens' values out of the candidates that an engine lists at each position.

    The sampled token stands among the most likely ones, in no useful order.

    Args:
        candidates: At each position, token id → log-probability, or → an object whose ``logprob``
            it is (vLLM's ``Logprob``).
        token_ids: The sampled tokens.

    Returns:
        One log-probability a token, in nats.

    Raises:
        ShapeError: There are not as many positions as tokens.
        RolloutError: A position does not list its sampled token.

    Example:
        >>> pick_sampled_log_probs([{13: -0.70, 382: -4.20}], [382])
        [-4.2]
    """
    if len(candidates) != len(token_ids):
        raise ShapeError(
            f"{len(candidates)} positions with log-probabilities for {len(token_ids)} tokens; "
            "one position a token: never pad or cut to fit"
        )
    picked = []
    for position, (listed, token) in enumerate(zip(candidates, token_ids, strict=True)):
        entry = (listed or {}).get(int(token))
        value = getattr(entry, "logprob", entry)
        if value is None:
            raise RolloutError(
                f"position {position}: token {int(token)} was sampled, log-probabilities are given "
                f"for {sorted(listed or {})}; ask the engine for the sampled token's"
            )
        picked.append(float(value))
    return picked


def assemble_rollout(
    response_ids: Iterable[Iterable[int]],
    rollout_log_probs: Iterable[Iterable[float | None]],
    *,
    source_mask: Iterable[Iterable[int]] | None = None,
    padding_mask: Iterable[Iterable[int]] | None = None,
    log_mass: Iterable[Iterable[float | None]] | None = None,
    pad_token_id: int = 0,
    version: int | None = None,
    allow_zeros: bool = False,
) -> Rollout:
    """Line up ragged or padded sequences as one right-padded batch.

    Each argument is a list of rows, or a tensor of them, one row a sequence.

    Args:
        response_ids: Tokens of each response.
        rollout_log_probs: One value for each of these tokens, in nats; None is allowed only where
            ``source_mask`` is 0.
        source_mask: 1 for a token that the policy sampled, 0 for one that the harness put there
            (tool output, an appended end-of-sequence); None means all were sampled.
        padding_mask: 0 where rows are padding, on either side; None means they have none.
        log_mass: log S of each token, if the engine reports it.
        pad_token_id: Token that fills the padding of the result.
        version: The weight version that generated the responses.
        allow_zeros: As in :func:`check_rollout_log_probs`.

    Returns:
        The batch, on the CPU; tokens of the harness keep their ids and have mask 0.

    Raises:
        ShapeError: A sequence's rows differ in length.
        NonFiniteError: A sampled token's log-probability or log_mass is NaN or infinite.
        RolloutError: As :func:`check_rollout_log_probs`, or something is not a number.

    Example:
        >>> assemble_rollout([[5, 6], [7]], [[-0.1, -0.2], [-0.3]]).response_mask
        tensor([[1, 1],
                [1, 0]])
    """
    ids = _rows("response_ids", response_ids)
    keep = [[True] * len(row) for row in ids]
    if padding_mask is not None:
        keep = _rows("padding_mask", padding_mask)
        _check_lengths("padding_mask", keep, "response_ids", ids)

    def align(name: str, values: Iterable[Iterable[Any]], fill: float) -> list[list[Any]]:
        rows = _rows(name, values)
        _check_lengths(name, rows, "response_ids", ids)
        rows = [list(compress(row, real)) for row, real in zip(rows, keep, strict=True)]
        length = max(map(len, rows), default=0)
        return [row + [fill] * (length - len(row)) for row in rows]

    if source_mask is None:
        source_mask = [[1] * len(row) for row in ids]
    mask = _tensor("source_mask", align("source_mask", source_mask, 0), torch.int64).ne(0).long()
    log_masses = None
    if log_mass is not None:
        log_masses = _tensor("log_mass", align("log_mass", log_mass, 0.0), torch.float32)
        _reject_non_finite("log_mass", log_masses, mask != 0)
        log_masses = log_masses.masked_fill(mask == 0, 0.0)
    return Rollout(
        response_ids=_tensor("response_ids", align("response_ids", ids, pad_token_id), torch.int64),
        response_mask=mask,
        rollout_log_probs=check_rollout_log_probs(
            align("rollout_log_probs", rollout_log_probs, 0.0),
            response_mask=mask,
            allow_zeros=allow_zeros,
        ),
        log_mass=log_masses,
        version=version,
    )


def _rows(name: str, values: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """Nested lists out of nested anything, a tensor included."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    try:
        return [list(row) for row in values]
    except TypeError:
        raise ShapeError(f"{name} is not made of rows; allowed: one row a sequence") from None


def _check_lengths(name: str, rows: Sequence[Any], other: str, others: Sequence[Any]) -> None:
    if len(rows) != len(others):
        raise ShapeError(f"{name} has {len(rows)} sequences, {other} {len(others)}")
    for index, (row, reference) in enumerate(zip(rows, others, strict=True)):
        if len(row) != len(reference):
            raise ShapeError(
                f"{name}[{index}] has {len(row)} values, {other}[{index}] {len(reference)}; "
                "one value a token: never pad or cut to fit"
            )


def _tensor(name: str, rows: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
    """Rows of one length as a tensor; None becomes NaN, for the finite check to find."""
    filled = [[math.nan if value is None else value for value in row] for row in rows]
    try:
        return torch.tensor(filled, dtype=dtype).reshape(len(rows), -1 if rows else 0)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{name} holds something that is not a number: {error}") from None


def _reject_non_finite(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    bad = mask & ~values.isfinite()
    if bad.any():
        raise NonFiniteError(
            f"{_first(name, values, bad)} (nan also stands for a missing value); the engine must "
            "report a finite number for every token it sampled, and others must be masked"
        )


def _first(name: str, values: torch.Tensor, bad: torch.Tensor) -> str:
    """The first offender, with its place."""
    row, column = bad.nonzero()[0].tolist()
    return f"{name}[{row}, {column}] is {values[row, column].item()}"
