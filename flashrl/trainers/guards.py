"""What keeps a bad rollout out of a trainer's loss, and what a run is told once.

A training step survives a token whose log-probability is no good: the token is masked out, counted
and named once.  What cannot be survived, values that do not line up with tokens, is an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from flashrl.core.schemes import QuantScheme
from flashrl.errors import RolloutError, ShapeError

__all__ = ["Screened", "check_correction", "check_vocabulary", "pad_rows", "screen", "warn_once"]

logger = logging.getLogger(__name__)

# A log-softmax in float32 may exceed 0 by rounding.
_MAX_LOG_PROB = 1e-3
# 0.0 says that the token was certain.  Where the trainer gives it less than even odds, somebody
# filled a gap in (OpenRLHF's executor does; vime#70).
_LEAST_LIKELY_CERTAIN = math.log(0.5)

_warned: set[str] = set()


def warn_once(kind: str, message: str) -> None:
    """Log a warning the first time something of its kind happens in this process.

    Args:
        kind: What happened, in a word.
        message: For people.
    """
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("%s (said once; the metrics go on counting)", message)


@attrs.frozen(kw_only=True, eq=False)
class Screened:
    """A batch whose unusable tokens are out of the way.

    Args:
        rollout_log_probs: log μ, finite everywhere; where a token is unusable it is the trainer's
            own value, so that a ratio is 1, (batch, response_length).
        response_mask: The mask without the unusable tokens, in its own dtype, the same shape.
        num_unusable: NaN, infinite, positive or missing.
        num_missing: Those of them that were not reported: NaN for None, or 0.0 filled in.
        num_tokens: Tokens in the response mask as it was.
    """

    rollout_log_probs: Tensor
    response_mask: Tensor
    num_unusable: int
    num_missing: int
    num_tokens: int

    @property
    def all_unusable(self) -> bool:
        """Whether tokens came, and none of them can be used."""
        return 0 < self.num_tokens == self.num_unusable


def screen(
    rollout_log_probs: Tensor | None,
    *,
    response_mask: Tensor,
    old_log_probs: Tensor | None = None,
) -> Screened:
    """Mask out tokens whose log-probability cannot be used, and warn once for each kind.

    Args:
        rollout_log_probs: log μ as the engine reported it, (batch, response_length); NaN where it
            reported nothing.
        response_mask: 1 where a token was sampled, the same shape.
        old_log_probs: log π of the trainer, the same shape.  With it a 0.0 where the trainer finds
            the token unlikely counts as missing; without it, only a response that is 0.0
            throughout.

    Returns:
        The batch as it can be used.

    Raises:
        RolloutError: There are no rollout log-probabilities at all.
        ShapeError: Shapes differ: what does not line up must not be guessed at.

    Example:
        >>> nan = float("nan")
        >>> screened = screen(torch.tensor([[-0.5, nan, 0.0]]), response_mask=torch.ones(1, 3),
        ...                   old_log_probs=torch.tensor([[-0.5, -1.0, -2.0]]))
        >>> screened.response_mask, screened.rollout_log_probs, screened.num_missing
        (tensor([[1., 0., 0.]]), tensor([[-0.5000, -1.0000, -2.0000]]), 2)
    """
    if rollout_log_probs is None:
        raise RolloutError(
            "the rollout brought no log-probabilities; ask the engine for the sampled tokens'"
        )
    for name, tensor in (
        ("rollout_log_probs", rollout_log_probs),
        ("old_log_probs", old_log_probs),
    ):
        if tensor is not None and tensor.shape != response_mask.shape:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}, response_mask "
                f"{tuple(response_mask.shape)}; one value a token: never pad or cut to fit"
            )
    in_response = response_mask != 0
    values = rollout_log_probs.detach()
    zero = (values == 0) & in_response
    if old_log_probs is None:
        filled = zero & (zero | ~in_response).all(dim=-1, keepdim=True)
        stand_in = torch.zeros_like(values)
    else:
        filled = zero & (old_log_probs.detach() < _LEAST_LIKELY_CERTAIN)
        stand_in = old_log_probs.detach().to(values.dtype).nan_to_num(0.0, 0.0, 0.0)
    missing = filled | (values.isnan() & in_response)
    usable = (values <= _MAX_LOG_PROB) & (values > -torch.inf)  # false for NaN, too
    unusable = in_response & (~usable | filled)
    screened = Screened(
        rollout_log_probs=torch.where(unusable | ~in_response, stand_in, values),
        response_mask=response_mask.masked_fill(unusable, 0),
        num_unusable=int(unusable.sum()),
        num_missing=int(missing.sum()),
        num_tokens=int(in_response.sum()),
    )
    _warn(screened, values, unusable, missing)
    return screened


def _warn(screened: Screened, values: Tensor, unusable: Tensor, missing: Tensor) -> None:
    for kind, bad in (("missing", missing), ("not finite or above 0", unusable & ~missing)):
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            warn_once(
                f"log-probs {kind}",
                f"rollout log-probabilities are {kind}: {int(bad.sum())} of {screened.num_tokens} "
                f"tokens, first [{row}, {column}], which is {values[row, column].item()}; these "
                "tokens are masked out of the loss",
            )


def pad_rows(
    rows: Sequence[Sequence[float | None]], *, lengths: Sequence[int], width: int | None = None
) -> Tensor:
    """Log-probabilities in lists as a right-padded tensor; a gap stays one.

    Args:
        rows: One value for each token of each response, in nats; None where there is none.
        lengths: Tokens of each response.
        width: Columns of the result; the longest response by default.

    Returns:
        float32, (batch, width): NaN where a value is None, 0 behind a response.

    Raises:
        RolloutError: A row has not one value for each token.

    Example:
        >>> pad_rows([[-0.5, None], [-1.0]], lengths=[2, 1])
        tensor([[-0.5000,     nan],
                [-1.0000,  0.0000]])
    """
    if len(rows) != len(lengths):
        raise RolloutError(f"{len(rows)} rows of log-probabilities for {len(lengths)} responses")
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise RolloutError(
                f"response {index} has {length} tokens and {len(row)} log-probabilities; one a "
                "token: never pad or cut to fit"
            )
    width = max(lengths, default=0) if width is None else width
    return torch.tensor(
        [
            [math.nan if value is None else value for value in row] + [0.0] * (width - len(row))
            for row in rows
        ],
        dtype=torch.float32,
    ).reshape(len(rows), width)


def check_correction(schemes: Iterable[QuantScheme], *, corrected: bool, remedy: str) -> None:
    """Warn once if rollouts are quantized and nothing corrects for it.

    Args:
        schemes: What the ranks generate with.
        corrected: Whether the loss uses importance weights, or its ratio is against the rollout.
        remedy: The trainer's own arguments that turn a correction on.
    """
    names = sorted({scheme.name for scheme in schemes if scheme.quantized})
    if names and not corrected:
        warn_once(
            "correction off",
            f"rollouts are quantized ({', '.join(names)}) and the correction is off: the gradient "
            f"is that of another distribution; turn it on with {remedy}",
        )


def check_vocabulary(vocab_size: int, *, num_tokens: int, masked: bool) -> None:
    """Warn once if the model can sample ids that the tokenizer does not have.

    Args:
        vocab_size: Rows of the model's logits.
        num_tokens: Tokens that the tokenizer knows.
        masked: Whether the trainer bars the others in the engine; its own softmax still has them.
    """
    surplus = vocab_size - num_tokens
    if surplus > 0:
        consequence = (
            "the engine does not sample them and the trainer's softmax still counts them, so every "
            "ratio is too small by what they weigh"
            if masked
            else "they can be sampled, and have no text"
        )
        warn_once(
            "vocabulary",
            f"the model has {vocab_size} logits and the tokenizer {num_tokens} tokens: of the "
            f"{surplus} others, {consequence}",
        )
