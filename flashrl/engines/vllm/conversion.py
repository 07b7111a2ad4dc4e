"""Making the layers of a running 16-bit model 8-bit, and 16-bit again."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flashrl.core.names import FUSED, LayerRules
from flashrl.core.profiles import Profile
from flashrl.core.profiles.smoothing import Smoothing
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.arguments import fingerprint
from flashrl.engines.vllm.checkpoint_names import Contents, read_contents
from flashrl.engines.vllm.entries import lm_head_in_fp32
from flashrl.engines.vllm.intake import Intake, static_scale
from flashrl.engines.vllm.kept import FP32HeadMethod, register_weight, unpack
from flashrl.engines.vllm.kv_cache import CacheScales
from flashrl.engines.vllm.linear import FlashRLLinearMethod
from flashrl.engines.vllm.placement import Piece, find_pieces
from flashrl.engines.vllm.storage import QuantizedStorage, check_blocks
from flashrl.errors import SchemeError, UnsupportedError

__all__ = ["Conversion"]


@attrs.frozen
class _Converted:
    """A layer that was made 8-bit, and what it was.

    Args:
        layer: The layer.
        method: vLLM's own method for it.
        dtype: dtype of its weight.
    """

    layer: Any
    method: Any
    dtype: torch.dtype


class Conversion:
    """The linears of a model that runs, made 8-bit; their 16-bit weights are freed.

    Args:
        model: vLLM's model.
        scheme: How.
        worker: vLLM's worker, whose graphs may have to be captured again.
        profile: Smoothing factors and static scales.

    Raises:
        SchemeError: The scheme does not fit a layer; nothing was changed.
        ProfileError: The profile does not fit the model; nothing was changed.
        UnsupportedError: The engine cannot change any more; nothing was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        worker: Any,
        *,
        profile: Profile | None = None,
    ) -> None:
        compat.check_convertible(worker)
        self._model, self._scheme, self._profile = model, scheme, profile
        chosen = self._choose_layers()
        contents = functools.cache(
            functools.partial(read_contents, worker.vllm_config.model_config)
        )
        self._originals: dict[str, list[Tensor]] = {}
        if profile is not None:
            profile.check(contents().shapes)
        _let_follow(model)
        pieces = self._find_pieces(chosen, contents)
        with compat.engine_context(worker):
            cache = CacheScales.of(model, scheme)
            self._converted = [
                self._convert(name, layer, pieces[f"{name}.weight"]) for name, layer in chosen
            ]
        self._intake = Intake(
            model,
            scheme,
            contents=contents,
            profile=profile,
            loaded=True,
            keep=True,
            cache=cache,
        )
        self._intake.begin()
        self._change_kept()
        if cache is not None:
            cache.refresh()
        compat.after_conversion(model, worker)

    def is_for(self, scheme: QuantScheme, profile: Profile | None) -> bool:
        """Whether this is what a scheme and a profile ask for."""
        return scheme == self._scheme and fingerprint(profile) == fingerprint(self._profile)

    def undo(self) -> None:
        """Give layers their 16-bit weights back, dequantized, and norms as they were pushed."""
        parts: dict[int, list[tuple[str, Piece]]] = defaultdict(list)
        for name, found in self._intake.plan.pieces.items():
            for index, piece in enumerate(found):
                if piece.storage is not None:
                    parts[id(piece.storage)].append((name, piece))
                elif name in self._intake.pushed:
                    piece.home.copy_(piece.cut(self._intake.pushed[name]))
                elif name in self._originals:
                    piece.home.copy_(self._originals[name][index])
        for item in self._converted:
            layer: Any = item.layer
            (storage,) = layer.quant_method.storages
            whole = storage.read(slice(0, storage.weight.shape[0]))
            for name, piece in parts[id(storage)]:
                _unsmooth(whole[piece.row : piece.row + piece.size[0]], self._factors(name, piece))
            del layer.weight_scale
            register_weight(layer, whole.to(item.dtype))
            layer.quant_method = item.method
        self._intake.remove()
        compat.forget_reload(self._model)

    def _choose_layers(self) -> list[tuple[str, Any]]:
        model, scheme = self._model, self._scheme
        rules = LayerRules.from_scheme(
            scheme, fused={**FUSED, **getattr(model, "packed_modules_mapping", {})}
        )
        chosen = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, LinearBase) and rules.matches(name, type(layer).__name__)
        ]
        _check(chosen, scheme)
        _refuse_experts(model, rules, scheme)
        if scheme.prune_dead_neurons and any(layer.tp_size > 1 for _, layer in chosen):
            raise UnsupportedError(
                f"scheme {scheme.name!r}: a rank sees part of a layer only, which is too little to "
                "find its dead channels; start the engine with launch_args('vllm', scheme), or set "
                "FLASHRL_CONFIG"
            )
        return chosen

    def _find_pieces(
        self, chosen: Sequence[tuple[str, Any]], contents: Any
    ) -> Mapping[str, list[tuple[str, Piece]]]:
        """The checkpoint's tensors in each parameter, where a profile tells them apart."""
        by_owner: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        if self._profile is None:
            return by_owner
        known: Contents = contents()
        for name, found in find_pieces(self._model, known.shapes, ()).items():
            for piece in found:
                by_owner[piece.owner].append((name, piece))
        if not self._scheme.dynamic:
            for layer_name, _ in chosen:
                for name, _ in by_owner[f"{layer_name}.weight"]:
                    static_scale(self._profile, self._scheme, name)
        return by_owner

    def _convert(self, name: str, layer: Any, pieces: Sequence[tuple[str, Piece]]) -> _Converted:
        weight = layer.weight.data
        storage = QuantizedStorage.allocate(
            name, self._scheme, tuple(weight.shape), device=weight.device
        )
        for row, part in self._parts(weight, layer, pieces, storage):
            storage.load(part, row=row, scale=_shared_scale(part, layer, self._scheme))
        method = FlashRLLinearMethod(self._scheme, name)
        result = _Converted(layer=layer, method=layer.quant_method, dtype=weight.dtype)
        method.install(layer, storage)
        layer.quant_method = method
        return result

    def _parts(
        self,
        weight: Tensor,
        layer: Any,
        pieces: Sequence[tuple[str, Piece]],
        storage: QuantizedStorage,
    ) -> Any:
        """First row and 16-bit values of each part of a layer, smoothed."""
        if not pieces:
            row = 0
            for rows in _partitions(layer):
                yield row, weight.narrow(0, row, rows)
                row += rows
            return
        for name, piece in pieces:
            row = (piece.home.storage_offset() - weight.storage_offset()) // weight.shape[1]
            if not self._scheme.dynamic:
                scale = static_scale(self._profile, self._scheme, name)
                home = storage.scale_of(slice(row, row + piece.size[0]))
                home.copy_(piece.cut_scale(scale, self._scheme))
            factors = self._factors(name, piece)
            yield (
                row,
                piece.home if factors is None else factors.apply(piece.home, dtype=torch.float32),
            )

    def _factors(self, name: str, piece: Piece) -> Smoothing | None:
        """What the profile does to a piece of a tensor."""
        smoothing = self._profile.smoothing_for(name) if self._profile is not None else None
        if smoothing is None:
            return None
        rows, columns = smoothing.rows, smoothing.columns
        one_axis = len(piece.shape) == 1
        return attrs.evolve(
            smoothing,
            rows=None if rows is None else rows[piece.columns if one_axis else piece.rows],
            columns=None if columns is None else columns[piece.columns],
        )

    def _change_kept(self) -> None:
        """Smooth what stays in 16 bit, and zero dead channels."""
        if self._profile is None and self._intake.pruner is None:
            return
        plan = self._intake.plan.pieces
        for name, found in plan.items():
            for piece in found if found[0].storage is None else ():
                factors = self._factors(name, piece)
                if factors is None and self._intake.pruner is None:
                    continue
                self._originals.setdefault(name, []).append(piece.home.clone())
                if factors is not None:
                    piece.home.copy_(factors.apply(piece.home, dtype=torch.float32))
        pruner = self._intake.pruner
        if pruner is None:
            return
        for name, (piece, *_) in plan.items():
            if piece.storage is None:
                pruner.take(name, piece.home.clone())
            else:
                pruner.take_values(name, piece.home)
        for name, norm in pruner.norms().items():
            plan[name][0].home.copy_(norm)


def _let_follow(model: nn.Module) -> None:
    """Let layers that stay in 16 bit follow their weights."""
    compat.follow_weights_on_cpu()
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            unpack(layer)
            layer.flashrl_follows = True
        if isinstance(layer, VocabParallelEmbedding) and lm_head_in_fp32():
            layer.quant_method = FP32HeadMethod()


def _unsmooth(values: Tensor, smoothing: Smoothing | None) -> None:
    """Undo :meth:`Smoothing.apply` on a matrix, in place."""
    if smoothing is not None and smoothing.columns is not None:
        values.div_(smoothing.columns.to(values.device))
    if smoothing is not None and smoothing.rows is not None:
        values.mul_(smoothing.rows.to(values.device)[:, None])


def _check(chosen: list[tuple[str, nn.Module]], scheme: QuantScheme) -> None:
    if not chosen and scheme.quantized:
        raise SchemeError(f"scheme {scheme.name!r} matches no linear layer of the model")
    for name, layer in chosen:
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            raise UnsupportedError(
                f"{name} is quantized already ({type(layer.quant_method).__name__}); start the "
                "engine from the 16-bit checkpoint, without a quantization argument"
            )
        check_blocks(name, scheme, _partitions(layer), _columns(layer))


def _refuse_experts(model: nn.Module, rules: LayerRules, scheme: QuantScheme) -> None:
    for name, module in model.named_modules():
        name = name.removesuffix(".routed_experts")
        if compat.is_experts(module) and rules.matches(name, "FusedMoE"):
            raise UnsupportedError(
                f"{name}: experts can not be made 8-bit while the engine runs; start it with "
                f"LLM(model, **flashrl.launch_args('vllm', {scheme.name!r})), or set FLASHRL_CONFIG"
            )


def _partitions(layer: Any) -> list[int]:
    return list(layer.output_partition_sizes)


def _columns(layer: Any) -> int:
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def _shared_scale(part: Tensor, layer: Any, scheme: QuantScheme) -> Tensor | None:
    """One scale a tensor, over all ranks that hold rows of it."""
    split = isinstance(layer, ColumnParallelLinear) and layer.tp_size > 1
    if scheme.strategy != "tensor" or not split:
        return None
    amax = part.abs().amax().float().reshape(1)
    torch.distributed.all_reduce(
        amax, torch.distributed.ReduceOp.MAX, group=compat.tensor_parallel_group()
    )
    return torch.where(amax == 0, 1.0, amax / scheme.qmax)
