"""Where each of a checkpoint's tensors lies in the engine, found out by asking the model itself.

vLLM fuses, slices and renames in each model's own ``load_weights``.  Here that very function is
given tensors without data; what it would have copied, from which part of the source to which part
of which parameter, is noted instead.  So reading weights back needs no table of model names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm.storage import QuantizedStorage

__all__ = ["Piece", "find_pieces"]


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a checkpoint's tensor, and where this rank holds it.

    Args:
        shape: Shape of the whole checkpoint tensor.
        size: Shape of the part.
        stride: Its strides in the contiguous checkpoint tensor.
        offset: Its first element there.
        home: The same part in the engine: a view of a parameter.
        owner: The parameter's name in the engine.
        storage: The 8-bit matrix that ``home`` is rows of; None for a weight that is kept.
        row: Where those rows start.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    home: Tensor = attrs.field(repr=False)
    owner: str = ""
    storage: QuantizedStorage | None = attrs.field(default=None, repr=False)
    row: int = 0

    @property
    def scheme(self) -> QuantScheme | None:
        """How it is quantized, or None."""
        return self.storage.scheme if self.storage else None

    @property
    def rows(self) -> slice:
        """Which rows of a checkpoint's matrix it is."""
        start = self.offset // self.shape[-1]
        return slice(start, start + self.size[0])

    @property
    def columns(self) -> slice:
        """Which columns of a checkpoint's matrix it is."""
        start = self.offset % self.shape[-1]
        return slice(start, start + self.size[-1])

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing else of the tensor on another rank."""
        return self.size == self.shape

    def cut(self, tensor: Tensor) -> Tensor:
        """The part of a checkpoint's tensor, a view if that is contiguous."""
        if self.is_whole:
            return tensor
        tensor = tensor.contiguous()
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def cut_scale(self, scale: Tensor, scheme: QuantScheme) -> Tensor:
        """What of a whole weight's scale belongs to the part.

        Args:
            scale: Shaped as the scheme says for the whole weight.
            scheme: How that is quantized.
        """
        if scheme.strategy == "tensor":
            return scale.view(1, 1)
        if scheme.block_structure is None:
            return scale[self.rows]
        (r, c), rows, columns = scheme.block_structure, self.rows, self.columns
        return scale[
            rows.start // r : -(-rows.stop // r), columns.start // c : -(-columns.stop // c)
        ]

    def take(self, values: Tensor, scale: Tensor) -> None:
        """Put the part of a weight in place that is quantized already.

        Args:
            values: 8-bit, the whole weight.
            scale: Shaped as the scheme says for it.
        """
        assert self.storage is not None  # a weight that is kept is never quantized
        scale = self.cut_scale(scale, self.storage.scheme)
        self.storage.take(self.cut(values), scale, row=self.row)

    def read(self) -> Tensor:
        """The part as the engine holds it, dequantized to float32, on the CPU."""
        if self.storage is None:
            return self.home.float().cpu()
        return self.storage.read(slice(self.row, self.row + self.home.shape[0])).cpu()


def find_pieces(
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    storages: Iterable[QuantizedStorage],
) -> dict[str, list[Piece]]:
    """Where each tensor of a checkpoint would go.

    Args:
        model: vLLM's model.
        shapes: The checkpoint's names and shapes.
        storages: The model's 8-bit matrices.

    Returns:
        The pieces of each name on this rank; names that the model ignores are left out.
    """
    recorder = _Recorder(
        sources={},
        storages={s.weight.untyped_storage().data_ptr(): s for s in storages},
        owners={p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()},
        pieces={},
    )
    # The class's own, for an intake may stand in its place.
    load = functools.partial(type(model).load_weights, model)
    with torch.no_grad(), recorder:
        load(recorder.offer(shapes))
    return recorder.pieces


@attrs.define(eq=False)
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each copy out of a tensor without data, and does not do it."""

    sources: dict[int, tuple[str, tuple[int, ...]]]
    storages: dict[int, QuantizedStorage]
    owners: dict[int, str]
    pieces: dict[str, list[Piece]]
    _alive: list[Tensor] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def offer(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            source = torch.empty(shape, device="meta", dtype=torch.bfloat16)
            self.sources[source.untyped_storage()._cdata] = name, tuple(shape)
            self._alive.append(source)  # so that no other source gets the same address
            yield name, source

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._note(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, home: Tensor, source: Tensor) -> None:
        found = self.sources.get(source.untyped_storage()._cdata)
        if found is None:  # the model computed something from it first
            return
        name, shape = found
        address = home.untyped_storage().data_ptr()
        storage = self.storages.get(address)
        row = 0
        if storage is not None:
            ahead = home.storage_offset() - storage.weight.storage_offset()
            row = ahead // storage.weight.shape[1]
        piece = Piece(
            shape=shape,
            size=tuple(source.shape),
            stride=source.stride(),
            offset=int(source.storage_offset()),
            home=home.detach(),
            owner=self.owners.get(address, ""),
            storage=storage,
            row=row,
        )
        self.pieces.setdefault(name, []).append(piece)


def storages_of(model: nn.Module) -> dict[str, QuantizedStorage]:
    """The model's 8-bit matrices by name."""
    found = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        for storage in getattr(method, "storages", ()):
            found[storage.name] = storage
    return found
