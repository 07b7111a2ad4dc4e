"""Where a layer's 8-bit weight lives, and the parameter through which SGLang loads it.

SGLang's loaders differ by layer, by model and by version, and all end in the same place: a view of
the parameter on which ``copy_`` is called with a slice of the checkpoint's tensor.  There the slice
is quantized.  So every loader works unpatched, ``load_format="direct"`` included, and a 16-bit
matrix is never cast into an 8-bit one, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from flashrl.core.quantize import dequantize, quantize_into
from flashrl.core.schemes import QuantScheme
from flashrl.errors import FlashRLError, SchemeError, ShapeError, WeightUpdateError

__all__ = ["QuantizedParameter", "QuantizedStorage"]


@attrs.define(eq=False, kw_only=True)
class QuantizedStorage:
    """One rank's 8-bit matrix and its scale.

    Args:
        name: The layer's name in the engine.
        scheme: How it is quantized.
        parts: Rows of each tensor of the checkpoint that it is made of, in order; the experts of a
            layer lie one below the other.
        weight: 8-bit values, [out, in].
        scale: float32, (out, 1), or one a block.
        original: The 16-bit parameter that it was made from, until an update makes it stale.
        report: Told of a tensor that was refused: where it starts, and why.  Raised without it.
    """

    name: str
    scheme: QuantScheme
    parts: tuple[int, ...]
    weight: Tensor
    scale: Tensor
    original: nn.Parameter | None = None
    report: Callable[[int, FlashRLError], None] | None = None
    _starts: tuple[int, ...] = attrs.field(init=False)
    _part_at: dict[int, int] = attrs.field(init=False)
    _loaded: set[int] = attrs.field(factory=set, init=False)
    _template: nn.Parameter | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._starts = tuple(accumulate(self.parts, initial=0))
        self._part_at = {row: part for part, row in enumerate(self._starts)}

    @classmethod
    def allocate(
        cls,
        name: str,
        scheme: QuantScheme,
        parts: Sequence[int],
        columns: int,
        *,
        device: torch.device | None = None,
    ) -> QuantizedStorage:
        """Make room for a matrix; zeros until tensors come.

        Args:
            name: The layer's name.
            scheme: How it is quantized.
            parts: Rows of each tensor that it is made of.
            columns: Columns of this rank.
            device: Where; torch's default without it.

        Raises:
            SchemeError: A part ends inside a block; the message names the layer.
        """
        _check_blocks(name, scheme, parts, columns)
        shape = (sum(parts), columns)
        scale_shape = scheme.scale_shape(shape) if scheme.block_structure else (shape[0], 1)
        return cls(
            name=name,
            scheme=scheme,
            parts=tuple(parts),
            weight=torch.zeros(shape, dtype=scheme.dtype, device=device),
            scale=torch.ones(scale_shape, dtype=torch.float32, device=device),
        )

    def load(self, source: Tensor, *, row: int) -> None:
        """Quantize 16-bit rows into place, each part by itself.

        Args:
            source: fp32, bf16 or fp16, [rows, in], on any device.
            row: Where it starts.

        Raises:
            NonFiniteError: A part holds NaN or infinity; nothing was written for it.
            ShapeError: The rows are not whole parts; nothing was written.
        """
        first, last = self._part_at.get(row), self._part_at.get(row + source.shape[0])
        if first is None or last is None or source.shape[1] != self.weight.shape[1]:
            raise ShapeError(
                f"{self.name}.weight takes whole parts of {self.parts[:4]} rows and "
                f"{self.weight.shape[1]} columns, got {tuple(source.shape)} at row {row}; "
                "nothing was written"
            )
        source = source.to(self.weight.device)
        for part in range(first, last):
            rows = slice(self._starts[part], self._starts[part + 1])
            quantize_into(
                source[rows.start - row : rows.stop - row],
                self.weight[rows],
                self.scale_of(rows),
                scheme=self.scheme,
                name=f"{self.name}.weight rows {rows.start} to {rows.stop - 1}",
            )
            self._loaded.add(part)
            self._forget_original()

    def take(self, values: Tensor, scale: Tensor, *, row: int) -> None:
        """Take a part that is quantized already.

        Args:
            values: 8-bit, of the scheme's dtype, [rows, in], on any device.
            scale: float32; as :meth:`scale_of` those rows, or one for all.
            row: Where it starts.
        """
        rows = slice(row, row + values.shape[0])
        self.weight[rows].copy_(values)
        self.scale_of(rows).copy_(scale)
        self._loaded.add(self._part_at[row])
        self._forget_original()

    def expect(self, row: int) -> None:
        """Note that the part that starts at a row is about to come."""
        self._loaded.discard(self._part_at[row])

    def has(self, row: int) -> bool:
        """Whether the part that starts at a row came."""
        return self._part_at[row] in self._loaded

    def scale_of(self, rows: slice) -> Tensor:
        """The scale of some rows, a view."""
        if self.scheme.block_structure is None:
            return self.scale[rows]
        block = self.scheme.block_structure[0]
        return self.scale[rows.start // block : -(-rows.stop // block)]

    def read(self, rows: slice) -> Tensor:
        """Some rows, dequantized to float32."""
        return dequantize(self.weight[rows], self.scale_of(rows), scheme=self.scheme)

    def restore(self, values: Tensor | None = None) -> nn.Parameter:
        """The 16-bit parameter again.

        Args:
            values: What it holds after an update, float32, [out, in]; default what is stored.
        """
        if self.original is not None:
            return self.original
        assert self._template is not None  # only what was made from a parameter goes back
        whole = self.read(slice(0, self.weight.shape[0])) if values is None else values
        data = whole.to(self._template.dtype).view(self._template.shape)
        parameter = nn.Parameter(data, requires_grad=False)
        parameter.__dict__.update(self._template.__dict__)
        return parameter

    def _forget_original(self) -> None:
        """Free the 16-bit values that an update has made stale; their kind is kept."""
        if self.original is not None:
            kind = nn.Parameter(self.original.data.to("meta"), requires_grad=False)
            kind.__dict__.update(self.original.__dict__)
            self._template, self.original = kind, None

    def check_complete(self) -> None:
        """Complain about parts that never came while others did.

        Raises:
            WeightUpdateError: Names the layer and the rows that were never loaded.
        """
        missing = [p for p in range(len(self.parts)) if p not in self._loaded]
        if missing and self._loaded:
            raise WeightUpdateError(
                f"{self.name}.weight: {len(missing)} of its {len(self.parts)} parts were never "
                f"loaded, the first at row {self._starts[missing[0]]}; the checkpoint lacks them"
            )

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the weight."""
        return tensor.untyped_storage().data_ptr() == self.weight.untyped_storage().data_ptr()

    def copy_into(self, view: Tensor, source: Tensor) -> None:
        """Load what SGLang copies into a view of the weight.

        Values of the 8-bit type itself are taken as they are: SGLang draws dummy weights so.

        Raises:
            FlashRLError: It was refused, and nobody is there to be told.
        """
        if source.dtype == self.weight.dtype:
            place = view.shape, view.stride(), view.storage_offset()
            self.weight.as_strided(*place).copy_(source)
            return
        columns = self.weight.shape[1]
        offset = int(view.storage_offset()) - int(self.weight.storage_offset())
        row, column = divmod(offset, columns)
        try:
            whole_rows = view.is_contiguous() and column == 0 and view.shape[-1] == columns
            if not whole_rows or view.shape != source.shape:
                raise ShapeError(
                    f"{self.name}.weight takes whole rows, got {tuple(source.shape)} for "
                    f"{tuple(view.shape)} at row {row}, column {column}; nothing was written"
                )
            self.load(source.reshape(-1, columns), row=row)
        except FlashRLError as error:
            if self.report is None:
                raise
            self.report(row, error)


class _LoadsSixteenBit:
    """Behaviour of the parameter and of every view of it: what is copied in is quantized."""

    home: QuantizedStorage

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target: Any = args[0] if args else None
        ours = isinstance(target, _LoadsSixteenBit)
        if ours and func is Tensor.copy_:
            with torch._C.DisableTorchFunctionSubclass():
                target.home.copy_into(target, args[1].detach())
            return target
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return _with_home(result, target.home) if ours else result


class _QuantizedView(_LoadsSixteenBit, torch.Tensor):
    """A view of a :class:`QuantizedParameter`, as loaders make them."""


class QuantizedParameter(_LoadsSixteenBit, nn.Parameter):
    """A storage's weight as a parameter of a layer.

    Args:
        home: The storage.
        shape: The parameter's shape; [out, in] without it.
    """

    def __new__(
        cls, home: QuantizedStorage, shape: tuple[int, ...] | None = None
    ) -> QuantizedParameter:
        """Wrap the storage's own memory."""
        data = home.weight if shape is None else home.weight.view(shape)
        parameter: QuantizedParameter = torch.Tensor._make_subclass(cls, data, False)
        parameter.home = home
        return parameter

    def __init__(self, home: QuantizedStorage, shape: tuple[int, ...] | None = None) -> None:
        pass


def _with_home(result: Any, home: QuantizedStorage) -> Any:
    """Let views of a weight load as the weight does; anything else passes."""
    if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
        return type(result)(_with_home(item, home) for item in result)
    if not isinstance(result, Tensor) or isinstance(result, _LoadsSixteenBit):
        return result
    if not home.holds(result):
        return result
    view = result.as_subclass(_QuantizedView)
    view.home = home
    return view


def _check_blocks(name: str, scheme: QuantScheme, parts: Sequence[int], columns: int) -> None:
    if scheme.block_structure is None:
        return
    block_rows, block_columns = scheme.block_structure
    if columns % block_columns or any(size % block_rows for size in parts):
        raise SchemeError(
            f"{name}: parts of {sorted(set(parts))} rows and {columns} columns do not fall on "
            f"blocks of {block_rows} x {block_columns}; add it to the scheme's ignore, or use "
            "fp8_channel"
        )
