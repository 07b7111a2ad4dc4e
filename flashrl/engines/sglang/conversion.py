"""The swap on a running engine: 16-bit layers become 8-bit, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from torch import nn

from flashrl.core.names import LayerRules
from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang import compat
from flashrl.engines.sglang.linear import FlashRLLinearMethod, refuse_split_scale
from flashrl.engines.sglang.moe import FlashRLMoEMethod
from flashrl.engines.sglang.storage import QuantizedStorage
from flashrl.errors import SchemeError, UnsupportedError

__all__ = ["Conversion"]


@attrs.frozen(eq=False)
class _Swap:
    """One layer, what ran it before, and the storages that took the place of its weights."""

    layer: Any
    method: Any
    homes: dict[str, QuantizedStorage]


class Conversion:
    """A model's 8-bit layers, and the way back.

    Args:
        model: A model of SGLang's in 16 bit; its layers are quantized from what they hold.
        scheme: How they are stored, and which ones.

    Raises:
        SchemeError: The scheme fits no layer, or not one that it names; the model is as it was.
        UnsupportedError: The model is quantized already, by something else.
    """

    def __init__(self, model: nn.Module, scheme: QuantScheme) -> None:
        self._swaps: list[_Swap] = []
        try:
            for name, layer in _convertible(model, scheme):
                self._swaps.append(_swap(name, layer, scheme))
        except Exception:
            self.undo()
            raise
        if scheme.quantized and not self._swaps:
            raise SchemeError(
                f"scheme {scheme.name!r} fits no layer of {type(model).__name__}: "
                f"targets {list(scheme.targets)}, ignore {list(scheme.ignore)}"
            )

    def undo(self) -> None:
        """Put the 16-bit layers back.

        They hold what they held, or, where an update has come since, its dequantized values.
        """
        for swap in self._swaps:
            for leaf, home in swap.homes.items():
                delattr(swap.layer, f"{leaf}_scale")
                swap.layer.register_parameter(leaf, home.restore())
            _set_method(swap.layer, swap.method)
        self._swaps = []


def _convertible(model: nn.Module, scheme: QuantScheme) -> Iterator[tuple[str, Any]]:
    """The layers to swap, looked at before any is touched."""
    rules = LayerRules.from_scheme(scheme)
    found = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, (LinearBase, FusedMoE)) and rules.matches(name, type(layer).__name__)
    ]
    for name, layer in found:
        weight = getattr(layer, "weight" if isinstance(layer, LinearBase) else "w13_weight", None)
        if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"{name} is quantized already ({type(layer.quant_method).__name__}); "
                "start the engine without quantization"
            )
    return iter(found)


def _swap(name: str, layer: Any, scheme: QuantScheme) -> _Swap:
    before = layer.quant_method
    method: FlashRLLinearMethod | FlashRLMoEMethod
    if isinstance(layer, LinearBase):
        split = isinstance(layer, ColumnParallelLinear) and compat.rank_of(layer)[1] > 1
        refuse_split_scale(name, scheme, split=split)
        method = FlashRLLinearMethod(scheme, name)
        homes = {"weight": _quantize(name, scheme, _partition_sizes(layer), layer.weight)}
        method.install(layer, homes["weight"], _loader_of(layer.weight))
    else:
        method = FlashRLMoEMethod(scheme, name)
        method.check(layer, with_bias=getattr(layer, "w13_weight_bias", None) is not None)
        experts, rows, _ = layer.w13_weight.shape
        parts = {
            "w13_weight": [rows // 2] * (2 * experts),
            "w2_weight": [layer.w2_weight.shape[1]] * experts,
        }
        loader = _loader_of(layer.w13_weight)
        homes = {
            leaf: _quantize(name, scheme, sizes, getattr(layer, leaf))
            for leaf, sizes in parts.items()
        }
        method.install(layer, experts, homes["w13_weight"], homes["w2_weight"], loader)
        method.create_moe_runner(layer, layer.moe_runner_config)
    _set_method(layer, method)
    return _Swap(layer, before, homes)


def _set_method(layer: Any, method: Any) -> None:
    """Some of SGLang's methods are modules, which cannot be overwritten by what is none."""
    del layer.quant_method
    layer.quant_method = method


def _quantize(
    name: str, scheme: QuantScheme, parts: Sequence[int], parameter: nn.Parameter
) -> QuantizedStorage:
    values = parameter.detach().flatten(0, -2)
    home = QuantizedStorage.allocate(name, scheme, parts, values.shape[1], device=values.device)
    home.load(values, row=0)
    home.original = parameter
    return home


def _partition_sizes(layer: Any) -> Sequence[int]:
    if isinstance(layer, ColumnParallelLinear):
        sizes: Sequence[int] = layer.output_partition_sizes
        return sizes
    return [layer.weight.shape[0]]


def _loader_of(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "weight_loader", None)
