"""Weights of a checkpoint that are too large to hold: read and dequantized some rows at a time."""

from __future__ import annotations

import math
from typing import Protocol

import attrs
import torch
from torch import Tensor

from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.core.schemes import QuantScheme

__all__ = ["LARGE", "Matrix", "read_matrix"]

LARGE = 1 << 24
"""Elements of a weight above which it stays on disk."""


class Matrix(Protocol):
    """What can be read by rows: a tensor, or a weight on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        ...

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Some rows."""
        ...


def read_matrix(
    checkpoint: Checkpoint,
    name: str,
    *,
    scale: Tensor | None = None,
    scheme: QuantScheme | None = None,
) -> Matrix:
    """Read a weight, or make it readable by rows if it is large.

    Args:
        checkpoint: What holds it.
        name: Its name, in any spelling.
        scale: Dequantizes it, shaped as ``scheme`` says; None for a weight in 16 bit.
        scheme: How it is stored; with ``scale``.

    Returns:
        The weight [out, in], in its own dtype, or in float32 if there is a scale.

    Raises:
        UnknownNameError: There is none of that name.
        ProfileError: The file is damaged.
    """
    shape = checkpoint.header(name).shape
    rows = _RowsOnDisk(checkpoint=checkpoint, name=name, shape=shape, scale=scale, scheme=scheme)
    return rows if math.prod(shape) > LARGE else rows[:]


@attrs.frozen(kw_only=True, eq=False)
class _RowsOnDisk:
    """A weight of which only the rows that are asked for are read."""

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]
    scale: Tensor | None
    scheme: QuantScheme | None

    def __getitem__(self, rows: slice, /) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        values = self.checkpoint.rows(self.name, start, stop)
        if self.scale is None or self.scheme is None:
            return values
        scale = self.scale
        if self.scheme.strategy != "tensor":
            height, width = self.scheme.block_structure or (1, 1)
            scale = scale[torch.arange(start, stop) // height]
            # A row's single scale is broadcast; a block's holds for its columns.
            scale = scale.repeat_interleave(width, 1)[:, : self.shape[1]]
        return values.float().mul_(scale)
