"""Weights that a sender quantized: values and scale arrive apart, in any order.

Their names are compressed-tensors': ``X.weight`` in 8 bit, and ``X.weight_scale`` in float32, one a
row, a tensor or a block, as the scheme says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.quantized import SCALE_SUFFIX
from flashrl.engines.vllm.loading import Faults
from flashrl.engines.vllm.placement import Piece
from flashrl.errors import NonFiniteError, SchemeError, ShapeError

__all__ = ["Halves", "is_half", "scale_part", "weight_of"]

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
    """What waits for its other half.

    Args:
        scheme: How the engine stores its linears.
    """

    scheme: QuantScheme
    _waiting: dict[str, tuple[bool, Tensor]] = attrs.field(factory=dict, init=False)

    def take(
        self, name: str, tensor: Tensor, pieces: Sequence[Piece], faults: Faults
    ) -> Tensor | None:
        """Take a half; with the other one there, both go in place.

        Args:
            name: Its name.
            tensor: Values or scale, of the whole weight; cloned if it must wait.
            pieces: Where the weight goes.
            faults: For what is not finite.

        Returns:
            The values, if they went in place.

        Raises:
            SchemeError: The engine stores another 8-bit type.
            ShapeError: It does not fit; nothing was kept.
            NonFiniteError: It holds what is no weight or no scale; nothing was written.
        """
        weight, is_scale = weight_of(name), name.endswith(_SCALE)
        shape = pieces[0].shape
        tensor = self._as_scale(name, tensor, shape) if is_scale else tensor
        if not is_scale and tensor.dtype != self.scheme.dtype:
            raise SchemeError(
                f"{name} is {tensor.dtype}, and the engine's scheme {self.scheme.name!r} stores "
                f"{self.scheme.dtype}; quantize to that, or push 16 bit"
            )
        if not is_scale and tensor.shape != shape:
            raise ShapeError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        was_scale, other = self._waiting.pop(weight, (is_scale, tensor))
        if was_scale == is_scale:
            self._waiting[weight] = is_scale, tensor.clone()
            return None
        values, scale = (other, tensor) if is_scale else (tensor, other)
        self._check(weight, values, scale, faults)
        for piece in pieces:
            assert piece.storage is not None  # the caller looked for a quantized weight
            piece.storage.take(
                piece.cut(values), scale_part(scale, piece, self.scheme), row=piece.row
            )
        return values

    def _as_scale(self, name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        wanted = self.scheme.scale_shape(shape)
        if scale.numel() != math.prod(wanted) or not scale.dtype.is_floating_point:
            raise ShapeError(
                f"{name}: for a weight of shape {shape}, scheme {self.scheme.name!r} has a scale "
                f"of shape {wanted}, got {scale.dtype} {tuple(scale.shape)}"
            )
        return scale.float().view(wanted)

    def _check(self, name: str, values: Tensor, scale: Tensor, faults: Faults) -> None:
        bad = ~((scale > 0) & torch.isfinite(scale)).all()
        if values.dtype != torch.int8:
            # e4m3fn has no infinity, and one NaN of either sign.
            bad = bad.to(values.device) | ((values.view(torch.uint8) & 0x7F) == 0x7F).any()
        flag = faults.flag(bad.device)
        if flag is not None:
            flag.copy_(bad)
        elif bad:
            raise NonFiniteError(
                f"{name}: its values hold NaN, or its scale is not finite and positive; nothing "
                "was written"
            )


def scale_part(scale: Tensor, piece: Piece, scheme: QuantScheme) -> Tensor:
    """What of a weight's scale belongs to a piece's rows and columns.

    Args:
        scale: Of the whole weight, shaped as the scheme says.
        piece: Where part of the weight goes.
        scheme: How it is quantized.
    """
    if scheme.strategy == "tensor":
        return scale.view(1, 1)
    if scheme.block_structure is None:
        return scale[piece.rows]
    r, c = scheme.block_structure
    rows, columns = piece.rows, piece.columns
    return scale[rows.start // r : -(-rows.stop // r), columns.start // c : -(-columns.stop // c)]
