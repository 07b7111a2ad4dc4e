"""In the process that generates: what the engine did not report must not reach the loss.

OpenRLHF's executors turn what the engine returns into tokens, ranges of actions and
log-probabilities, where a missing one is 0.0, as if the token had been certain.  Here such tokens
are cut out of the ranges: they are context then, like an environment's answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from flashrl.errors import RolloutError
from flashrl.trainers import guards
from flashrl.trainers.metrics import PREFIX
from flashrl.trainers.openrlhf.options import SECTION, schemes

__all__ = ["NUM_UNUSABLE", "VERSION", "counting_syncs", "guarded", "mask_missing"]

NUM_UNUSABLE = f"{PREFIX}num_unusable"
VERSION = f"{PREFIX}weight_version"
"""Beside a response: tokens that were cut out, and syncs that its engine had had."""

_MAX_LOG_PROB = 1e-3  # a log-softmax in float32 may exceed 0 by rounding
_Execute = Callable[..., Awaitable[dict[str, Any]]]


@attrs.define(eq=False)
class _Recorder:
    """An engine's actor, for one response; remembers what it generated."""

    actor: Any
    generated: list[Any] = attrs.field(factory=list)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await self.actor.generate(*args, **kwargs)
        self.generated.append(output.outputs[0])
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)


def guarded(execute: _Execute) -> _Execute:
    """``execute`` of an executor, with its response looked through.

    Args:
        execute: OpenRLHF's, called with keywords.

    Returns:
        The same function.  It raises :class:`RolloutError` where nothing can be masked.
    """

    @functools.wraps(execute)
    async def with_guard(
        self: Any, *, sampling_params: Any, llm_engine: Any, **others: Any
    ) -> dict[str, Any]:
        asked = sampling_params.logprobs is not None
        recorder = _Recorder(llm_engine)
        version = num_syncs(llm_engine)
        response = await execute(
            self, sampling_params=sampling_params, llm_engine=recorder, **others
        )
        if asked:
            num_unusable = mask_missing(response, recorder.generated)
            logs = {NUM_UNUSABLE: float(num_unusable), VERSION: float(version)}
            response["extra_logs"] = {**(response.get("extra_logs") or {}), **logs}
        else:
            guards.check_correction(schemes(), corrected=False, remedy=f"--{SECTION}_level token")
        return response

    return with_guard


def mask_missing(response: dict[str, Any], generated: Sequence[Any]) -> int:
    """Cut tokens without a usable log-probability out of a response's ranges of actions.

    Args:
        response: What an executor made of it; its ``action_ranges`` are changed.
        generated: vLLM's completions it was made of, one a range.

    Returns:
        How many tokens were cut out.

    Raises:
        RolloutError: A completion has not one entry for each token, or none that is usable.
    """
    ranges = response["action_ranges"]
    if len(ranges) != len(generated):
        return 0  # an executor of the user's own, which keeps its own books
    usable = [_usable(completion) for completion in generated]
    num_unusable = sum(row.count(False) for row in usable)
    if not num_unusable:
        return 0
    if not any(map(any, usable)):
        raise RolloutError(
            f"none of the {num_unusable} log-probabilities of a response is usable; the engine "
            "reports none of the tokens that it samples"
        )
    guards.warn_once(
        "log-probs missing",
        f"rollout log-probabilities are missing or not finite: {num_unusable} of "
        f"{sum(map(len, usable))} tokens of a response; these tokens are masked out of the loss",
    )
    response["action_ranges"] = [
        piece
        for (start, _), row in zip(ranges, usable, strict=True)
        for piece in _runs(row, start=start)
    ]
    return num_unusable


def _usable(completion: Any) -> list[bool]:
    """Whether each token of a completion has a log-probability."""
    token_ids, reported = completion.token_ids, completion.logprobs
    if reported is None or len(reported) != len(token_ids):
        num_reported = "no" if reported is None else len(reported)
        raise RolloutError(
            f"a response of {len(token_ids)} tokens came with {num_reported} log-probabilities; "
            "one a token: never pad or cut to fit"
        )
    return [_is_usable(entry, token) for entry, token in zip(reported, token_ids, strict=True)]


def _is_usable(entry: Mapping[int, Any] | None, token_id: int) -> bool:
    found = None if entry is None else entry.get(token_id)
    return found is not None and math.isfinite(found.logprob) and found.logprob <= _MAX_LOG_PROB


def _runs(kept: Sequence[bool], *, start: int) -> list[tuple[int, int]]:
    """Ranges of what is kept.

    Example:
        >>> _runs([True, False, True, True], start=10)
        [(10, 11), (12, 14)]
    """
    edges = [
        start + i
        for i, (before, after) in enumerate(zip([False, *kept], [*kept, False], strict=True))
        if before != after
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def counting_syncs(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncLLM.collective_rpc``, which OpenRLHF sends weights through; counts whole syncs."""

    @functools.wraps(collective_rpc)
    async def with_count(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), **others: Any
    ) -> Any:
        result = await collective_rpc(self, method, timeout=timeout, args=args, **others)
        # The last argument says whether it was the last tensor.
        if isinstance(method, str) and method.startswith("update_weight") and args and args[-1]:
            self.flashrl_num_syncs = getattr(self, "flashrl_num_syncs", 0) + 1
        return result

    return with_count


def num_syncs(actor: Any) -> int:
    """Syncs that the engine of a rollout actor has had."""
    return int(getattr(actor.llm, "flashrl_num_syncs", 0))
