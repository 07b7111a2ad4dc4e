"""Where a layer's 8-bit weight lives, and how a 16-bit shard gets into it.

The storage outlives whatever parameter object vLLM keeps on the layer: its layerwise reload swaps
parameters for meta tensors, then for fresh ones, then copies those back.  A shard is always
quantized into the one home, so nothing is buffered, addresses never move, and a reload that brings
only some shards leaves the others as they were.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from flashrl.core.quantize import compute_scale, dequantize, quantize_into
from flashrl.core.schemes import QuantScheme
from flashrl.errors import SchemeError, WeightUpdateError

__all__ = ["QuantizedStorage"]


@attrs.define(eq=False)
class QuantizedStorage:
    """An 8-bit matrix and its scale, [out, in] of one rank.

    Args:
        name: The layer's name in the engine.
        scheme: How it is quantized.
        weight: 8-bit values, [out, in].
        scale: float32, (out, 1), or one a block.
    """

    name: str
    scheme: QuantScheme
    weight: Tensor
    scale: Tensor
    _rows_loaded: dict[int, int] = attrs.field(factory=dict, init=False)

    @classmethod
    def allocate(
        cls,
        name: str,
        scheme: QuantScheme,
        shape: tuple[int, int],
        *,
        device: torch.device | None = None,
    ) -> QuantizedStorage:
        """Make room for a matrix; zeros until a shard comes.

        Args:
            name: The layer's name.
            scheme: How it is quantized.
            shape: [out, in] of this rank.
            device: Where; torch's default without it.
        """
        by_row = scheme.block_structure is None
        return cls(
            name=name,
            scheme=scheme,
            weight=torch.zeros(shape, dtype=scheme.dtype, device=device),
            scale=torch.ones(
                (shape[0], 1) if by_row else scheme.scale_shape(shape),
                dtype=torch.float32,
                device=device,
            ),
        )

    def load(
        self,
        source: Tensor,
        *,
        row: int = 0,
        scale: Tensor | None = None,
        smoothing: Tensor | None = None,
        flag: Tensor | None = None,
    ) -> None:
        """Quantize a 16-bit shard into place.

        Args:
            source: fp32, bf16 or fp16, [rows, in], on any device.
            row: Where it starts.
            scale: One scale for all of it, (1,); computed from ``source`` without it.
            smoothing: Factor per input channel that multiplies it first, (in,).
            flag: As :func:`quantize_into` takes it.

        Raises:
            NonFiniteError: The shard holds NaN or infinity, and there is no ``flag``; nothing was
                written.
            ShapeError: It does not fit; nothing was written.
        """
        label = f"{self.name}.weight rows {row} to {row + source.shape[0] - 1}"
        rows = slice(row, row + source.shape[0])
        scheme, home = self.scheme, self.scale_of(rows)
        source = source.to(self.weight.device)
        if scale is not None:
            # Refuses what is not finite.
            compute_scale(source, scheme, smoothing=smoothing, name=label)
            home.copy_(scale)
            scheme = scheme.evolve(dynamic=False)
        quantize_into(
            source,
            self.weight[rows],
            home,
            scheme=scheme,
            smoothing=smoothing,
            flag=flag,
            name=label,
        )
        self._rows_loaded[row] = source.shape[0]

    def rows(self, row: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Room for a shard that is about to be written: its values and its scale, views."""
        self._rows_loaded[row] = num_rows
        rows = slice(row, row + num_rows)
        return self.weight[rows], self.scale_of(rows)

    def take(self, values: Tensor, scale: Tensor, *, row: int = 0) -> None:
        """Take a shard that is quantized already.

        Args:
            values: 8-bit, of the scheme's dtype, [rows, in], on any device.
            scale: As :meth:`scale_of` those rows.
            row: Where it starts.
        """
        home, home_scale = self.rows(row, values.shape[0])
        home.copy_(values)
        home_scale.copy_(scale)

    def scale_of(self, rows: slice) -> Tensor:
        """The scale of some rows, a view."""
        if self.scheme.block_structure is None:
            return self.scale[rows]
        block = self.scheme.block_structure[0]
        return self.scale[rows.start // block : -(-rows.stop // block)]

    def read(self, rows: slice) -> Tensor:
        """Some rows, dequantized to float32."""
        return dequantize(self.weight[rows], self.scale_of(rows), scheme=self.scheme)

    def check_complete(self) -> None:
        """Complain about shards that never came while others did.

        Raises:
            WeightUpdateError: Names the rows.
        """
        loaded = sum(self._rows_loaded.values())
        if 0 < loaded < self.weight.shape[0]:
            raise WeightUpdateError(
                f"{self.name}.weight: {loaded} of {self.weight.shape[0]} rows were loaded "
                f"(starting at {sorted(self._rows_loaded)}); the checkpoint lacks a shard of it"
            )


def check_blocks(name: str, scheme: QuantScheme, partitions: list[int], columns: int) -> None:
    """Refuse a layer whose shards end inside a block.

    Args:
        name: The layer's name.
        scheme: How it is to be quantized.
        partitions: Rows of each shard of this rank.
        columns: Columns of this rank.

    Raises:
        SchemeError: Names the layer and the sizes.
    """
    if scheme.block_structure is None:
        return
    block_rows, block_columns = scheme.block_structure
    if columns % block_columns or any(size % block_rows for size in partitions):
        raise SchemeError(
            f"{name}: shards of {partitions} rows and {columns} columns do not fall on blocks of "
            f"{block_rows} by {block_columns}; add it to the scheme's ignore, or use fp8_channel"
        )
