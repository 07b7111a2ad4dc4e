"""The log-ratio of trainer to rollout, token by token, with everything that must not count removed.

``log_ratio`` is ℓ = log π - log μ: π the trainer's policy, μ the distribution the token was really
sampled from.  The importance ratio is ρ = exp(ℓ).  Both :mod:`~flashrl.core.correction` and
:mod:`~flashrl.core.mismatch` walk over a batch a block of rows at a time, so the memory they need
beside their result does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import attrs
import torch

from flashrl.errors import NonFiniteError, ShapeError

__all__ = [
    "MAX_LOG_RATIO",
    "RowBlock",
    "bounded_exp",
    "check_advantages",
    "check_tensors",
    "iter_blocks",
    "raise_invalid",
]

MAX_LOG_RATIO = 20.0
"""A log-ratio is clamped to ± this before ``exp``: e²⁰ ≈ 4.9e8, whose square fits float32."""

_MAX_LOG_PROB = 1e-3
"""A log-softmax in float32 may exceed 0 by rounding; more than this is no log-probability."""

# A CPU is fastest while a block stays in its cache; a GPU wants few, large kernels.
_BLOCK_TOKENS = {"cpu": 2**16}
_BLOCK_TOKENS_ELSEWHERE = 2**23


@attrs.frozen(kw_only=True, eq=False)
class RowBlock:
    """Some rows of a batch, detached, with 0 wherever a token does not count.

    Args:
        rows: Where in the batch the rows stand.
        policy: log π, (rows, response_length), float32 or float64.
        behavior: log μ, the same shape; log S is part of it where a support was truncated.
        log_ratio: ℓ = log π - log μ, not clamped, the same shape.
        mask: 1 where the token counts, else 0, in the dtype of ``log_ratio``: multiplying by it is
            several times faster than ``torch.where`` on a CPU.
        num_tokens: Tokens that count in each row, (rows,), in the same dtype.
        num_invalid: Response tokens of each row that held an unusable value, (rows,).
    """

    rows: slice
    policy: torch.Tensor
    behavior: torch.Tensor
    log_ratio: torch.Tensor
    mask: torch.Tensor
    num_tokens: torch.Tensor
    num_invalid: torch.Tensor

    @property
    def sequence_log_ratio(self) -> torch.Tensor:
        """Σ m ℓ of each row, (rows,)."""
        return self.log_ratio.sum(dim=-1)

    @property
    def mean_log_ratio(self) -> torch.Tensor:
        """Σ m ℓ / Σ m of each row, (rows,)."""
        return self.sequence_log_ratio / self.num_tokens.clamp(min=1)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(ℓ), with ℓ clamped to ± :data:`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()


def check_tensors(response_mask: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Demand that every tensor is there and shaped like the mask, so that nothing broadcasts.

    Args:
        response_mask: 1 where a token was sampled, (batch, response_length).
        **tensors: The tensors to compare with it, by the name an error should use.

    Raises:
        ShapeError: One is missing, is no floating-point tensor, or differs in shape or device.
    """
    if not isinstance(response_mask, torch.Tensor) or response_mask.dim() != 2:
        got = tuple(getattr(response_mask, "shape", ())) or type(response_mask).__name__
        raise ShapeError(f"response_mask must be a (batch, response_length) tensor, got {got}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise ShapeError(
                f"{name} must be a floating-point tensor, got {got}; where the engine reported "
                "nothing, set response_mask to 0 instead of making a value up"
            )
        if tensor.shape != response_mask.shape:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}, response_mask "
                f"{tuple(response_mask.shape)}; both must be (batch, response_length)"
            )
        if tensor.device != response_mask.device:
            raise ShapeError(
                f"{name} is on {tensor.device}, response_mask on {response_mask.device}"
            )


def check_advantages(advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Give every token its advantage.

    Args:
        advantages: (batch, response_length), or (batch,) with one for each response.
        response_mask: (batch, response_length).

    Returns:
        The advantages, detached, (batch, response_length).

    Raises:
        ShapeError: Any other shape, or another device.
    """
    if isinstance(advantages, torch.Tensor) and advantages.shape == response_mask.shape[:1]:
        advantages = advantages.unsqueeze(-1).expand(response_mask.shape)
    check_tensors(response_mask, advantages=advantages)
    return advantages.detach()


def iter_blocks(
    policy: torch.Tensor,
    behavior: torch.Tensor,
    response_mask: torch.Tensor,
    log_mass: torch.Tensor | None = None,
) -> Iterator[RowBlock]:
    """Walk over a batch in blocks of whole rows.

    A token whose value is NaN, infinite or above 0 is left out like a masked one, and counted.

    Args:
        policy: log π, (batch, response_length).
        behavior: log μ as sampled, the same shape.
        response_mask: 1 where a token counts, the same shape.
        log_mass: log S, the mass that survived top-k, top-p or min-p.  μ was divided by S and π was
            not, so log μ + log S is what π compares with.

    Yields:
        The blocks, in order; none for an empty batch.
    """
    dtype = torch.promote_types(torch.promote_types(policy.dtype, behavior.dtype), torch.float32)
    num_rows, num_columns = response_mask.shape
    block_tokens = _BLOCK_TOKENS.get(response_mask.device.type, _BLOCK_TOKENS_ELSEWHERE)
    step = max(1, block_tokens // max(1, num_columns))
    for start in range(0, num_rows if num_columns else 0, step):
        rows = slice(start, start + step)
        pi = policy[rows].detach().to(dtype)
        mu = behavior[rows].detach().to(dtype)
        in_response = response_mask[rows] != 0
        # Whatever is compared with NaN is false, so these two bounds also catch NaN.
        valid = in_response & (torch.maximum(pi, mu) <= _MAX_LOG_PROB)
        if log_mass is not None:
            mass = log_mass[rows].detach().to(dtype)
            valid &= mass <= _MAX_LOG_PROB
            mu = mu + mass
        valid &= torch.minimum(pi, mu) > -torch.inf
        mask = valid.to(dtype)
        pi = pi.nan_to_num(0.0, 0.0, 0.0).mul_(mask)
        mu = mu.nan_to_num(0.0, 0.0, 0.0).mul_(mask)
        num_tokens = mask.sum(dim=-1)
        yield RowBlock(
            rows=rows,
            policy=pi,
            behavior=mu,
            log_ratio=pi - mu,
            mask=mask,
            num_tokens=num_tokens,
            num_invalid=in_response.sum(dim=-1) - num_tokens,
        )


def raise_invalid(response_mask: torch.Tensor, **tensors: torch.Tensor) -> NoReturn:
    """Raise the error that names the first unusable values.

    Args:
        response_mask: 1 where a token counts, (batch, response_length).
        **tensors: The tensors to search, by name.

    Raises:
        NonFiniteError: Always.
    """
    faults = []
    for name, tensor in tensors.items():
        bad = (response_mask != 0) & ~((tensor <= _MAX_LOG_PROB) & (tensor > -torch.inf))
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            faults.append(
                f"{name}[{row}, {column}] is {tensor[row, column].item()} ({int(bad.sum())} in all)"
            )
    where = "; ".join(faults) or "another rank holds unusable log-probabilities"
    raise NonFiniteError(
        f"{where}: the log-probability of a sampled token is finite and at most 0. "
        "Set response_mask to 0 where none was reported, or on_invalid='mask' to drop such tokens"
    )
