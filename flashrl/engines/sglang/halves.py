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
from flashrl.engines.sglang.slots import Slot
from flashrl.errors import NonFiniteError, SchemeError, ShapeError

__all__ = ["Halves", "is_half", "weight_of"]

_8_BIT = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE = f".weight{SCALE_SUFFIX}"


def is_half(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the values or the scale of a quantized weight."""
    return tensor.dtype in _8_BIT or name.endswith(_SCALE)


def weight_of(name: str) -> str:
    """The weight that a half belongs to."""
    return name.removesuffix(SCALE_SUFFIX) if name.endswith(_SCALE) else name


@attrs.define
class Halves:
    """What waits for its other half."""

    _waiting: dict[str, tuple[bool, Tensor]] = attrs.field(factory=dict, init=False)

    def forget(self, slot: Slot) -> None:
        """Drop what waits: the weight came in 16 bit."""
        self._waiting.pop(slot.name, None)

    def take(self, name: str, tensor: Tensor, slot: Slot) -> str | None:
        """Take a half; with the other one there, both go in place.

        Args:
            name: Its name.
            tensor: Values or scale, of the whole weight; cloned if it must wait.
            slot: Where the weight goes.

        Returns:
            What is still missing, for people; None when the weight is in place.

        Raises:
            SchemeError: The engine keeps this weight in another type.
            ShapeError: It does not fit.
            NonFiniteError: It holds what is no weight or no scale.  Nothing was written, ever.
        """
        if slot.scheme is None:
            raise SchemeError("is quantized, and the engine keeps this weight in 16 bit")
        is_scale = name.endswith(_SCALE)
        if is_scale:
            tensor = _as_scale(tensor, slot.scheme, slot.shape)
        else:
            _check_values(tensor, slot.scheme, slot.shape)
        was_scale, other = self._waiting.get(slot.name, (is_scale, tensor))
        if was_scale == is_scale:
            self._waiting[slot.name] = is_scale, tensor.clone()
            return "scale came without its values" if is_scale else "values came without a scale"
        del self._waiting[slot.name]
        values, scale = (other, tensor) if is_scale else (tensor, other)
        slot.take(values, scale)
        return None


def _as_scale(scale: Tensor, scheme: QuantScheme, shape: tuple[int, ...]) -> Tensor:
    wanted = scheme.scale_shape(shape)
    if scale.numel() != math.prod(wanted) or not scale.dtype.is_floating_point:
        raise ShapeError(
            f"has dtype {scale.dtype} and shape {tuple(scale.shape)}; for a weight of shape "
            f"{shape}, {scheme.name} has a float32 scale of shape {wanted}"
        )
    scale = scale.float().view(wanted)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise NonFiniteError("holds what is not finite and positive; nothing was written")
    return scale


def _check_values(values: Tensor, scheme: QuantScheme, shape: tuple[int, ...]) -> None:
    if values.dtype != scheme.dtype:
        raise SchemeError(
            f"has dtype {values.dtype}, and {scheme.name} stores {scheme.dtype}; "
            "quantize to that, or push 16 bit"
        )
    if tuple(values.shape) != shape:
        raise ShapeError(f"has shape {tuple(values.shape)}, the engine's is {shape}")
    # e4m3fn has no infinity, and one NaN of either sign.
    if scheme.type == "float" and bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise NonFiniteError("holds NaN; nothing was written")
