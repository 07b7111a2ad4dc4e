"""Where tensors go, remembered: a push after the first does not search for it again.

vLLM walks the whole model for every call of ``load_weights`` and tries each tensor's name against
every fused layer.  What it finds is always the same, so it is asked once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from flashrl.core.names import NameIndex
from flashrl.core.quantize import compute_scale, kernels
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm.placement import Piece

__all__ = ["Batch", "Plan", "load_pieces"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Plan:
    """Where each tensor of a checkpoint goes on this rank.

    Args:
        pieces: As :func:`find_pieces` returns them.
        parameters: The model's own, by name.
    """

    def __init__(
        self, pieces: Mapping[str, Sequence[Piece]], parameters: Mapping[str, Any]
    ) -> None:
        self.pieces = pieces
        self._index = NameIndex(pieces)
        # A parameter that is kept in 16 bit may have been given other memory since.
        self._homes = {
            name: [
                (parameters[piece.owner], piece.home.untyped_storage().data_ptr())
                for piece in found
                if piece.storage is None and piece.owner in parameters
            ]
            for name, found in pieces.items()
        }

    def find(self, name: str, tensor: Tensor) -> Sequence[Piece] | None:
        """Where a 16-bit tensor goes; None for one that vLLM must look at itself."""
        found = self.pieces.get(name)
        if found is None or tensor.shape != found[0].shape or tensor.dtype not in _FLOATS:
            return None
        for parameter, address in self._homes[name]:
            if parameter.untyped_storage().data_ptr() != address:
                return None
        return found

    def find_quantized(self, name: str) -> Sequence[Piece] | None:
        """Where a weight goes that is kept in 8 bit; None for any other."""
        known = self._index.find(name)
        found = self.pieces[known] if known is not None else None
        return found if found is not None and found[0].storage is not None else None


def load_pieces(
    pieces: Sequence[Piece],
    tensor: Tensor,
    *,
    smoothing: Tensor | None = None,
    flag: Tensor | None = None,
    name: str = "weight",
) -> None:
    """Put a tensor's parts of this rank in place.

    Args:
        pieces: Where it goes.
        tensor: The whole tensor, fp32, bf16 or fp16.
        smoothing: Factor per input channel that multiplies a matrix first, (in,).
        flag: As :func:`quantize_into` takes it.
        name: The tensor's name, for errors.
    """
    for piece in pieces:
        part = piece.cut(tensor)
        if piece.storage is None:
            piece.home.copy_(part)
            continue
        scheme = piece.storage.scheme
        scale = None
        if scheme.dynamic and _scale_is_shared(piece):
            factors = None if smoothing is None else smoothing.to(tensor.device)
            scale = compute_scale(tensor, scheme, smoothing=factors, name=name)
        piece.storage.load(
            part,
            row=piece.row,
            scale=scale,
            smoothing=None if smoothing is None else smoothing[piece.columns],
            flag=flag,
        )


def _scale_is_shared(piece: Piece) -> bool:
    """Whether ranks share the rows of a tensor that has one scale."""
    assert piece.storage is not None  # a matrix in 8 bit was asked about
    return piece.storage.scheme.strategy == "tensor" and piece.size[0] != piece.shape[0]


@attrs.define
class Batch:
    """Matrices that are quantized together, with one launch for all of one layout.

    Only for tensors that stay as they are until :meth:`run`.

    Args:
        scheme: How.
        flag: int32 (1,), on the device: set where one of them was not finite.
    """

    scheme: QuantScheme
    flag: Tensor
    _shards: list[tuple[Tensor, Tensor, Tensor]] = attrs.field(factory=list, init=False)
    _names: list[str] = attrs.field(factory=list, init=False)

    def add(self, name: str, pieces: Sequence[Piece], tensor: Tensor) -> bool:
        """Take a tensor; False, and nothing taken, if it cannot wait."""
        if tensor.device != self.flag.device or any(
            piece.storage is None or _scale_is_shared(piece) for piece in pieces
        ):
            return False
        for piece in pieces:
            assert piece.storage is not None  # seen above
            home, scale = piece.storage.rows(piece.row, piece.size[0])
            self._shards.append((piece.cut(tensor), home, scale))
            self._names.append(name)
        return True

    def run(self) -> None:
        """Quantize what was taken."""
        if self._shards:
            kernels.quantize_many(self._shards, scheme=self.scheme, flag=self.flag)

    def find_faults(self) -> Iterator[str]:
        """Wait for the device; the names of what was not finite."""
        if not self._shards or not int(self.flag):
            return
        for name, (source, _, _) in zip(self._names, self._shards, strict=True):
            if not bool(torch.isfinite(source).all()):
                yield name
