"""Scales of an FP8 KV cache, from the weights alone.

A scale must hold what a cache will be asked to store before it has been seen, and follow every
weight update.  Calibration prompts would make it depend on which came first.  But keys and values
are projections of a normalized vector, so the weights bound them; and since e4m3 is a floating
type, a bound far above what comes costs no precision until values fall below its smallest normal
number, 28,672 times under its largest.  Scales are powers of two: small steps in training leave
them where they are, and scaling by them rounds nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashrl.errors import NonFiniteError

__all__ = ["bound_norm", "bound_projection", "choose_cache_scale"]

_E4M3_MAX = 448.0
_MOST = 64  # exponents beyond which float32 would run out


def bound_projection(weight: Tensor, norm_weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Largest magnitude of each output of a projection that follows an RMSNorm.

    The norm gives ``g ∘ x̂`` with ``‖x̂‖₂ ≤ √d``, so by Cauchy-Schwarz
    ``|wⱼ · (g ∘ x̂) + bⱼ| ≤ √d ‖wⱼ ∘ g‖₂ + |bⱼ|``.

    Args:
        weight: The projection's, [out, in].
        norm_weight: What the norm multiplies by, g, (in,).
        bias: The projection's, (out,).

    Returns:
        float32, (out,).

    Example:
        >>> bound_projection(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 2.0]))
        tensor([4.2426, 2.8284])
    """
    scaled = weight.float() * norm_weight.float()
    bound: Tensor = math.sqrt(weight.shape[1]) * torch.linalg.vector_norm(scaled, dim=1)
    return bound if bias is None else bound + bias.float().abs()


def bound_norm(norm_weight: Tensor) -> Tensor:
    """Largest magnitude of an RMSNorm's output, also after a rotary embedding: ``√d max|g|``.

    Args:
        norm_weight: What the norm multiplies by, g, (d,).

    Returns:
        float32, ().
    """
    largest: Tensor = norm_weight.float().abs().max()
    return math.sqrt(norm_weight.numel()) * largest


def choose_cache_scale(bound: float) -> float:
    """The smallest power of two that brings a bound within e4m3's 448; 1 for a bound of 0.

    Args:
        bound: Largest magnitude that the cache may be asked to store.

    Returns:
        The scale: stored value × scale = value.

    Raises:
        NonFiniteError: The bound is NaN or infinite.

    Example:
        >>> choose_cache_scale(448.0), choose_cache_scale(449.0), choose_cache_scale(3.0)
        (1.0, 2.0, 0.0078125)
    """
    if not math.isfinite(bound):
        raise NonFiniteError(
            f"the KV cache's scale cannot follow a bound of {bound}: the weights are not finite"
        )
    if bound <= 0:
        return 1.0
    mantissa, exponent = math.frexp(bound / _E4M3_MAX)  # mantissa in [0.5, 1)
    return math.ldexp(1.0, min(max(exponent - (mantissa == 0.5), -_MOST), _MOST))
