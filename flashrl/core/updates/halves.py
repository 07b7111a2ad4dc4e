"""Weights that a sender quantized: values and scale arrive apart, in any order.

Their names are compressed-tensors': ``X.weight`` in 8 bit, and ``X.weight_scale`` in float32, one a
row, a tensor or a block, as the scheme says.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.quantized import SCALE_SUFFIX
from flashrl.errors import NonFiniteError, SchemeError, ShapeError

__all__ = ["Halves", "is_half", "is_scale", "weight_of"]

_8_BIT = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE = f".weight{SCALE_SUFFIX}"


def is_scale(name: str) -> bool:
    """Whether a tensor is the scale of a quantized weight."""
    return name.endswith(_SCALE)


def is_half(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the values or the scale of a quantized weight."""
    return tensor.dtype in _8_BIT or is_scale(name)


def weight_of(name: str) -> str:
    """The weight that a half belongs to; a name that is no scale's as it is."""
    return name.removesuffix(SCALE_SUFFIX) if is_scale(name) else name


@attrs.define
class Halves:
    """What waits for its other half."""

    _waiting: dict[str, tuple[bool, Tensor]] = attrs.field(factory=dict, init=False)

    def take(
        self,
        name: str,
        tensor: Tensor,
        *,
        weight: str,
        shape: tuple[int, ...],
        scheme: QuantScheme,
        flag: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Take a half.

        Args:
            name: As it was sent; tells values and scale apart.
            tensor: Values or scale, of the whole weight; cloned if it must wait.
            weight: What the engine calls the weight.
            shape: The weight's.
            scheme: How the engine stores it.
            flag: Set where the half is no half of a weight, instead of an error, so that nothing
                waits for the device; (1,).

        Returns:
            Values and scale, shaped as the scheme says, once both are there.

        Raises:
            SchemeError: The engine stores another 8-bit type; nothing was kept.
            ShapeError: It does not fit; nothing was kept.
            NonFiniteError: It holds NaN, or a scale that is not finite and positive; nothing was
                kept.
        """
        scale_came = is_scale(name)
        if scale_came:
            tensor = _shape_scale(tensor, shape, scheme)
        else:
            _check_values(tensor, shape, scheme)
        unsound = _is_unsound(tensor, scale=scale_came)
        if flag is not None:
            flag.copy_(unsound)
        elif unsound:
            raise NonFiniteError(
                "holds NaN, or what is not finite and positive; nothing was written"
            )
        scale_waits, other = self._waiting.get(weight, (scale_came, tensor))
        if scale_waits == scale_came:
            self._waiting[weight] = scale_came, tensor.clone()
            return None
        del self._waiting[weight]
        return (other, tensor) if scale_came else (tensor, other)

    def missing(self, weight: str) -> str | None:
        """What of a weight has not come, for people; None if nothing waits for it."""
        if weight not in self._waiting:
            return None
        scale_waits, _ = self._waiting[weight]
        return "scale came without its values" if scale_waits else "values came without a scale"

    def forget(self, weight: str) -> None:
        """Drop what waits: the weight came in 16 bit."""
        self._waiting.pop(weight, None)


def _shape_scale(scale: Tensor, shape: tuple[int, ...], scheme: QuantScheme) -> Tensor:
    wanted = scheme.scale_shape(shape)
    if scale.numel() != math.prod(wanted) or not scale.dtype.is_floating_point:
        raise ShapeError(
            f"has dtype {scale.dtype} and shape {tuple(scale.shape)}; for a weight of shape "
            f"{shape}, {scheme.name} has a float32 scale of shape {wanted}"
        )
    return scale.float().view(wanted)


def _check_values(values: Tensor, shape: tuple[int, ...], scheme: QuantScheme) -> None:
    if values.dtype != scheme.dtype:
        raise SchemeError(
            f"has dtype {values.dtype}, and {scheme.name} stores {scheme.dtype}; quantize to that, "
            "or push 16 bit"
        )
    if tuple(values.shape) != tuple(shape):
        raise ShapeError(f"has shape {tuple(values.shape)}, the engine's is {tuple(shape)}")


def _is_unsound(half: Tensor, *, scale: bool) -> Tensor:
    """Whether a half holds what no weight has, bool, ()."""
    if scale:
        return ~((half > 0) & torch.isfinite(half)).all()
    if half.dtype == torch.int8:
        return torch.zeros((), dtype=torch.bool, device=half.device)
    # e4m3fn has no infinity, and one NaN of either sign.
    return ((half.view(torch.uint8) & 0x7F) == 0x7F).any()
