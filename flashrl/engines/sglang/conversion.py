"""The swap on a running engine: 16-bit layers become 8-bit, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from torch import Tensor, nn

from flashrl.core.names import LayerRules
from flashrl.core.profiles import Profile
from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang import compat
from flashrl.engines.sglang.gate import WeightGate
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
    """A model's 8-bit layers, the gate before them, and the way back.

    Args:
        model: A model of SGLang's in 16 bit; its layers are quantized from what they hold.
        scheme: How they are stored, and which ones.
        profile: Smoothing factors and static scales, applied to whatever is loaded.

    Raises:
        SchemeError: The scheme fits no layer, or not one that it names, or wants static scales that
            the profile lacks; the model is as it was.
        ProfileError: The profile does not fit the model; the model is as it was.
        UnsupportedError: The model is quantized already, by something else.
    """

    def __init__(
        self, model: nn.Module, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> None:
        self._swaps: list[_Swap] = []
        self._gate: WeightGate | None = None
        try:
            for name, layer in _convertible(model, scheme):
                self._swaps.append(_swap(name, layer, scheme))
            if scheme.quantized and not self._swaps:
                raise SchemeError(
                    f"scheme {scheme.name!r} fits no layer of {type(model).__name__}: "
                    f"targets {list(scheme.targets)}, ignore {list(scheme.ignore)}"
                )
            model_type = compat.model_type_of(model)
            self._gate = WeightGate(model, model_type=model_type, profile=profile)
            self._gate.open()
            self._load()
        except Exception:
            self.undo()
            raise

    def undo(self) -> None:
        """Put the 16-bit layers back.

        They hold what they held, or, where an update has come since, its dequantized values.
        """
        for swap in self._swaps:
            for leaf, home in swap.homes.items():
                parameter = getattr(swap.layer, leaf)
                delattr(swap.layer, f"{leaf}_scale")
                values = None if home.original is not None else self._unsmoothed(parameter)
                swap.layer.register_parameter(leaf, home.restore(values))
            _set_method(swap.layer, swap.method)
        if self._gate is not None:
            for name, tensor in self._gate.smoother.pushed.items():
                self._gate.slots[name].held().copy_(tensor)
            self._gate.remove()
        self._swaps, self._gate = [], None

    def _load(self) -> None:
        """Quantize what the layers held, and smooth what is kept."""
        assert self._gate is not None  # it was made just now
        slots = self._gate.slots.values()
        for swap in self._swaps:
            for leaf, home in swap.homes.items():
                parameter, original = getattr(swap.layer, leaf), home.original
                assert original is not None  # nothing was pushed yet
                inside = [slot for slot in slots if slot.parameter is parameter]
                values = self._gate.smoother.smooth_parts(original.detach(), inside)
                try:
                    home.load(values.flatten(0, -2), row=0)
                finally:
                    home.original = original
        for slot in slots:
            if slot.scheme is None and self._gate.smoother.of(slot) is not None:
                held = slot.parameter.detach()
                held.copy_(self._gate.smoother.smooth_parts(held, [slot]))

    def _unsmoothed(self, parameter: Any) -> Tensor:
        """A parameter's dequantized values, as they were before smoothing, [out, in]."""
        assert self._gate is not None  # an update came through it
        home: QuantizedStorage = parameter.home
        inside = [slot for slot in self._gate.slots.values() if slot.parameter is parameter]
        return self._gate.smoother.undo_parts(home.read(slice(0, home.weight.shape[0])), inside)


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
        homes = {"weight": _make_room(name, scheme, _partition_sizes(layer), layer.weight)}
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
            leaf: _make_room(name, scheme, sizes, getattr(layer, leaf))
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


def _make_room(
    name: str, scheme: QuantScheme, parts: Sequence[int], parameter: nn.Parameter
) -> QuantizedStorage:
    home = QuantizedStorage.allocate(
        name, scheme, parts, parameter.shape[-1], device=parameter.device
    )
    home.original = parameter
    return home


def _partition_sizes(layer: Any) -> Sequence[int]:
    if isinstance(layer, ColumnParallelLinear):
        sizes: Sequence[int] = layer.output_partition_sizes
        return sizes
    return [layer.weight.shape[0]]


def _loader_of(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "weight_loader", None)
