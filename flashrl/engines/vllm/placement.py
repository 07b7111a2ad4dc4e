"""Where each of a checkpoint's tensors lies in the engine, found out by asking the model itself.

vLLM fuses, slices and renames in each model's own ``load_weights``.  Here that very function is
given tensors without data; what it would have copied, from which part of the source to which part
of which parameter, is noted instead.  So reading weights back needs no table of model names.
"""

from __future__ import annotations

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
        size: Shape of the part.
        stride: Its strides in the contiguous checkpoint tensor.
        offset: Its first element there.
        home: The same part in the engine: a view of a parameter.
        storage: The 8-bit matrix that ``home`` is rows of; None for a weight that is kept.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    home: Tensor = attrs.field(repr=False)
    storage: QuantizedStorage | None = attrs.field(default=None, repr=False)

    @property
    def scheme(self) -> QuantScheme | None:
        """How it is quantized, or None."""
        return self.storage.scheme if self.storage else None

    def read(self) -> Tensor:
        """The part as the engine holds it, dequantized to float32, on the CPU."""
        if self.storage is None:
            return self.home.float().cpu()
        row = (self.home.storage_offset() - self.storage.weight.storage_offset()) // (
            self.storage.weight.shape[1]
        )
        return self.storage.read(slice(row, row + self.home.shape[0])).cpu()


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
        pieces={},
    )
    with torch.no_grad(), recorder:
        model.load_weights(recorder.offer(shapes))
    return recorder.pieces


@attrs.define(eq=False)
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each copy out of a tensor without data, and does not do it."""

    sources: dict[int, str]
    storages: dict[int, QuantizedStorage]
    pieces: dict[str, list[Piece]]
    _alive: list[Tensor] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def offer(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            source = torch.empty(shape, device="meta", dtype=torch.bfloat16)
            self.sources[source.untyped_storage()._cdata] = name
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
        name = self.sources.get(source.untyped_storage()._cdata)
        if name is None:  # the model computed something from it first
            return
        piece = Piece(
            size=tuple(source.shape),
            stride=source.stride(),
            offset=int(source.storage_offset()),
            home=home.detach(),
            storage=self.storages.get(home.untyped_storage().data_ptr()),
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
