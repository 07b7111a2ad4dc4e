"""Where each tensor of a checkpoint lives in SGLang's model, on this rank.

SGLang fuses q, k and v, gate and up, and the experts of a layer; a :class:`Slot` says which rows of
which parameter a checkpoint's tensor is, and which part of it this rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import attrs
import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from flashrl.core.names import FUSED
from flashrl.core.profiles.smoothing import Smoothing
from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.pushes import ExpertLayout
from flashrl.engines.sglang import compat
from flashrl.engines.sglang.storage import QuantizedParameter

__all__ = ["Slot", "by_alias", "find_slots"]


@attrs.frozen(kw_only=True)
class Slot:
    """One tensor of a checkpoint, on this rank.

    Args:
        name: Its checkpoint name.
        parameter: The parameter that it is part of.
        rows: Which rows, with experts one below the other.
        shape: Shape of the whole tensor, over all ranks.
        dim: The axis that is split over ranks, or None.
        rank: Which part this rank has.
        ranks: How many parts there are.
        aliases: Other names of the same tensor.
    """

    name: str
    parameter: nn.Parameter = attrs.field(repr=False, eq=False)
    rows: slice
    shape: tuple[int, ...]
    dim: int | None = None
    rank: int = 0
    ranks: int = 1
    aliases: tuple[str, ...] = ()

    @property
    def scheme(self) -> QuantScheme | None:
        """How it is quantized, or None."""
        parameter = self.parameter
        return parameter.home.scheme if isinstance(parameter, QuantizedParameter) else None

    @property
    def stored_dtype(self) -> torch.dtype:
        """What it is stored in."""
        return self.scheme.dtype if self.scheme else self.parameter.dtype

    @property
    def addresses(self) -> list[int]:
        """Where its values and its scale lie; an update does not move them."""
        if not isinstance(self.parameter, QuantizedParameter):
            return [self.parameter.data_ptr()]
        home = self.parameter.home
        return [self.parameter.data_ptr(), home.weight.data_ptr(), home.scale.data_ptr()]

    def read(self) -> Tensor:
        """This rank's part, dequantized to float32, on the CPU."""
        if isinstance(self.parameter, QuantizedParameter):
            return self.parameter.home.read(self.rows).cpu()
        return self.held().float().cpu()

    def held(self) -> Tensor:
        """This rank's part as it is held in 16 bit, a view."""
        data = self.parameter.detach()
        if data.ndim == 3 and len(self.shape) == 2:
            data = data.flatten(0, 1)
        return data[self.rows] if data.ndim else data

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor, a view."""
        return whole if self.dim is None else whole.chunk(self.ranks, self.dim)[self.rank]

    def take(self, values: Tensor, scale: Tensor) -> None:
        """Put this rank's part of a weight that is quantized already in place.

        Args:
            values: 8-bit, of the scheme's dtype, the whole weight.
            scale: Shaped as the scheme says for the whole weight.
        """
        assert isinstance(self.parameter, QuantizedParameter)  # whoever calls looked
        self.parameter.home.take(self.part(values), self.cut_scale(scale), row=self.rows.start)

    def cut_scale(self, scale: Tensor) -> Tensor:
        """What of a whole weight's scale belongs to this rank's part, (rows, 1) or by blocks."""
        if scale.numel() == 1:
            return scale.view(1, 1)
        by_row = self.scheme is not None and self.scheme.block_structure is None
        return scale if by_row and self.dim == 1 else self.part(scale)

    def cut_smoothing(self, smoothing: Smoothing) -> Smoothing:
        """What smoothing does to this rank's part."""
        rows, columns = smoothing.rows, smoothing.columns
        if rows is not None and self.dim == 0:
            rows = self.part(rows)
        if columns is not None and self.dim == 1:
            columns = columns.chunk(self.ranks)[self.rank]
        return attrs.evolve(smoothing, rows=rows, columns=columns)


def find_slots(model: nn.Module, *, layout: ExpertLayout) -> dict[str, Slot]:
    """Every tensor that a full update of a model brings, by checkpoint name.

    Args:
        model: A model of SGLang's.
        layout: What its experts are called.
    """
    slots: dict[str, Slot] = {}
    name_of: dict[tuple[int, int], str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for slot in _slots_of(module_name, module, layout):
            key = id(slot.parameter), slot.rows.start
            if key not in name_of:
                name_of[key] = slot.name
                slots[slot.name] = slot
            elif name_of[key] != slot.name:
                first = slots[name_of[key]]
                slots[first.name] = attrs.evolve(first, aliases=(*first.aliases, slot.name))
    return {
        name: attrs.evolve(slot, aliases=(*slot.aliases, *_trainer_names(name, layout)))
        for name, slot in slots.items()
    }


def _trainer_names(name: str, layout: ExpertLayout) -> Iterator[str]:
    """What a trainer calls a tensor of an expert or router, where the checkpoint differs."""
    block, dot, rest = name.rpartition(f".{layout.block}.")
    *expert, leaf, kind = rest.split(".")
    ours = {layout.gate: "gate_proj", layout.up: "up_proj", layout.down: "down_proj"}
    theirs = ".".join([f"{block}.mlp", *expert, ours.get(leaf, leaf), kind]) if dot else name
    if theirs != name:
        yield theirs


def _slots_of(name: str, module: Any, layout: ExpertLayout) -> Iterator[Slot]:
    if isinstance(module, LinearBase):
        yield from _linear_slots(name, module)
    elif isinstance(module, FusedMoE):
        yield from _expert_slots(name, module, layout)
    elif isinstance(module, VocabParallelEmbedding):
        yield from _embedding_slots(name, module)
    else:
        prefix = f"{name}." if name else ""
        for leaf, parameter in module.named_parameters(recurse=False):
            yield _whole(prefix + leaf, parameter)


def _whole(name: str, parameter: nn.Parameter) -> Slot:
    shape = tuple(parameter.shape)
    return Slot(
        name=name, parameter=parameter, rows=slice(0, shape[0] if shape else 0), shape=shape
    )


def _linear_slots(name: str, layer: Any) -> Iterator[Slot]:
    rank, ranks = compat.rank_of(layer)
    parts = _column_parts(name, layer, rank, ranks)
    for leaf in ("weight", "bias"):
        parameter = getattr(layer, leaf, None)
        if parameter is None:
            continue
        columns = tuple(parameter.shape[1:])
        if isinstance(layer, RowParallelLinear) and leaf == "weight":
            whole = _whole(f"{name}.{leaf}", parameter)
            shape = (whole.shape[0], columns[0] * ranks)
            yield attrs.evolve(whole, shape=shape, dim=1, rank=rank, ranks=ranks)
        elif not isinstance(layer, ColumnParallelLinear):
            yield _whole(f"{name}.{leaf}", parameter)
        else:
            starts = accumulate((size for _, size, _, _ in parts), initial=0)
            for (part, size, part_rank, part_ranks), start in zip(parts, starts, strict=False):
                yield Slot(
                    name=f"{part}.{leaf}",
                    parameter=parameter,
                    rows=slice(start, start + size),
                    shape=(size * part_ranks, *columns),
                    dim=0,
                    rank=part_rank,
                    ranks=part_ranks,
                )


def _column_parts(name: str, layer: Any, rank: int, ranks: int) -> list[tuple[str, int, int, int]]:
    """Name, rows, rank and ranks of each tensor that a column-parallel layer is made of."""
    parent, dot, leaf = name.rpartition(".")
    shards = FUSED.get(leaf, ())
    if isinstance(layer, QKVParallelLinear) and len(shards) == 3:
        replicas = layer.num_kv_head_replicas
        sizes = (layer.q_proj_shard_size, layer.kv_proj_shard_size, layer.v_proj_shard_size)
        owners = ((rank, ranks), *[(rank // replicas, ranks // replicas)] * 2)
        return [
            (parent + dot + shard, size, *owner)
            for shard, size, owner in zip(shards, sizes, owners, strict=True)
        ]
    if isinstance(layer, MergedColumnParallelLinear) and len(shards) == len(layer.output_sizes):
        return [
            (parent + dot + shard, size // ranks, rank, ranks)
            for shard, size in zip(shards, layer.output_sizes, strict=True)
        ]
    return [(name, getattr(layer, "output_size_per_partition", 0), rank, ranks)]


def _expert_slots(name: str, layer: Any, layout: ExpertLayout) -> Iterator[Slot]:
    rank, ranks = layer.moe_tp_rank, layer.moe_tp_size
    for leaf, projections, dim in (
        ("w13_weight", (layout.gate, layout.up), 0),
        ("w2_weight", (layout.down,), 1),
    ):
        parameter = getattr(layer, leaf)
        experts, rows, columns = parameter.shape
        size = rows // len(projections)
        shape = (size * ranks, columns) if dim == 0 else (size, columns * ranks)
        for expert in range(experts):
            for index, projection in enumerate(projections):
                start = expert * rows + index * size
                yield Slot(
                    name=f"{name}.{expert}.{projection}.weight",
                    parameter=parameter,
                    rows=slice(start, start + size),
                    shape=shape,
                    dim=dim,
                    rank=rank,
                    ranks=ranks,
                )


def _embedding_slots(name: str, layer: Any) -> Iterator[Slot]:
    indices = layer.shard_indices
    size = indices.org_vocab_end_index - indices.org_vocab_start_index
    start, end = indices.padded_org_vocab_start_index, indices.padded_org_vocab_end_index
    rank, ranks = start // max(end - start, 1), int(layer.tp_size)
    for leaf in ("weight", "bias"):
        parameter = getattr(layer, leaf, None)
        if parameter is not None:
            yield Slot(
                name=f"{name}.{leaf}",
                parameter=parameter,
                rows=slice(0, size),
                shape=(layer.org_vocab_size, *parameter.shape[1:]),
                dim=0,
                rank=rank,
                ranks=ranks,
            )


def by_alias(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Slots by every name that they have."""
    named = dict(slots)
    for slot in slots.values():
        named.update(dict.fromkeys(slot.aliases, slot))
    return named
