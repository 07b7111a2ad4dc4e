"""The swap: a model's linears become 8-bit, and every weight keeps its checkpoint name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from flashrl.core.interfaces import WeightInfo
from flashrl.core.names import LayerRules
from flashrl.core.pushes import split_experts
from flashrl.core.quantize import dequantize
from flashrl.core.schemes import QuantScheme
from flashrl.engines.huggingface.layers import (
    QuantizedExperts,
    QuantizedLinear,
    is_stacked_experts,
)
from flashrl.errors import NonFiniteError, SchemeError

__all__ = ["Conversion"]


class Conversion:
    """A model's 8-bit layers, and the way back.

    Args:
        model: Its linears are replaced in place, from the weights they hold.
        scheme: How they are stored, and which ones.

    Raises:
        SchemeError: The scheme fits no layer; the model is as it was.

    Attributes:
        linears: Every 8-bit linear, by the name of its weight.
        infos: Every tensor of a full update, by checkpoint name.
    """

    def __init__(self, model: nn.Module, scheme: QuantScheme) -> None:
        self._model = model
        self._originals = dict(_convertible(model, scheme))
        if scheme.quantized and not self._originals:
            raise SchemeError(
                f"scheme {scheme.name!r} fits no layer of {type(model).__name__}: "
                f"targets {list(scheme.targets)}, ignore {list(scheme.ignore)}"
            )
        self._updated: set[str] = set()
        with torch.no_grad():
            for name, module in self._originals.items():
                model.set_submodule(name, _quantize(name, module, scheme))
        self.linears = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        self._kept = _kept_tensors(model, self.linears)
        self.infos = self._compute_infos()

    def load(self, name: str, tensor: Tensor) -> None:
        """Put one 16-bit tensor in place.

        Raises:
            NonFiniteError: It holds NaN or infinity; nothing was written.
        """
        linear = self.linears.get(name)
        if linear is not None:
            linear.load(tensor, name=name)
            self._forget_original(name)
        elif torch.isfinite(tensor).all():
            self._kept[name].copy_(tensor)
        else:
            raise NonFiniteError(f"{name} holds NaN or infinity; nothing was written")

    def read(self, name: str) -> Tensor:
        """One tensor as it is held, dequantized to float32."""
        linear = self.linears.get(name)
        if linear is None:
            return self._kept[name].float()
        return dequantize(linear.weight, linear.weight_scale, scheme=linear.scheme)

    def undo(self) -> None:
        """Put the 16-bit modules back.

        They hold what they held, or, where an update has come since, its dequantized values.
        """
        for name, original in self._originals.items():
            if name in self._updated:
                _dequantize_into(original, self._model.get_submodule(name))
            self._model.set_submodule(name, original)

    def _forget_original(self, weight_name: str) -> None:
        """Free the 16-bit values that an update has made stale."""
        module_name = weight_name.removesuffix(".weight")
        while module_name not in self._originals:
            module_name = module_name.rpartition(".")[0]
        if module_name not in self._updated:
            self._updated.add(module_name)
            for parameter in _weights_of(self._originals[module_name]):
                parameter.data = parameter.data.new_empty(0)

    def _compute_infos(self) -> dict[str, WeightInfo]:
        infos = {
            name: WeightInfo(
                shape=tuple(linear.weight.shape), dtype=linear.scheme.dtype, scheme=linear.scheme
            )
            for name, linear in self.linears.items()
        }
        names_of: defaultdict[tuple[int, torch.Size], list[str]] = defaultdict(list)
        for name, tensor in self._kept.items():
            names_of[tensor.data_ptr(), tensor.shape].append(name)
        for name, *aliases in names_of.values():
            kept = self._kept[name]
            infos[name] = WeightInfo(
                shape=tuple(kept.shape), dtype=kept.dtype, aliases=tuple(aliases)
            )
        return infos


def _convertible(model: nn.Module, scheme: QuantScheme) -> Iterator[tuple[str, nn.Module]]:
    """The modules to replace: linears and stacks of experts that the scheme wants."""
    rules = LayerRules.from_scheme(scheme)
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            tied = holders[id(module.weight)] > 1
            if not tied and rules.matches(name, "Linear"):
                yield name, module
        elif is_stacked_experts(module) and rules.matches(name, type(module).__name__):
            yield name, module


def _quantize(name: str, module: nn.Module, scheme: QuantScheme) -> nn.Module:
    """The 8-bit module that takes a 16-bit module's place, with its weights."""
    if isinstance(module, nn.Linear):
        linear = QuantizedLinear(
            module.out_features,
            module.in_features,
            scheme,
            bias=module.bias,
            device=module.weight.device,
        )
        linear.load(module.weight, name=f"{name}.weight")
        return linear
    experts = QuantizedExperts(module, scheme)
    gate_up, downs = _weights_of(module)
    gates, ups = gate_up.chunk(2, dim=1)
    for projection, weights in (("gate_proj", gates), ("up_proj", ups), ("down_proj", downs)):
        for index, linear in enumerate(experts.linears(projection)):
            linear.load(weights[index], name=f"{name}.{index}.{projection}.weight")
    return experts


def _dequantize_into(original: nn.Module, quantized: nn.Module) -> None:
    """Give a 16-bit module, whose values were freed, those of the 8-bit one."""

    def values(linear: QuantizedLinear) -> Tensor:
        return dequantize(linear.weight, linear.weight_scale, scheme=linear.scheme)

    if isinstance(quantized, QuantizedExperts):
        gates, ups, downs = (
            torch.stack([values(linear) for linear in quantized.linears(projection)])
            for projection in ("gate_proj", "up_proj", "down_proj")
        )
        restored = [torch.cat([gates, ups], dim=1), downs]
    else:
        restored = [values(cast(QuantizedLinear, quantized))]
    for parameter, value in zip(_weights_of(original), restored, strict=True):
        parameter.data = value.to(parameter.dtype)


def _weights_of(module: nn.Module) -> list[nn.Parameter]:
    names = ["weight"] if isinstance(module, nn.Linear) else ["gate_up_proj", "down_proj"]
    return [module.get_parameter(name) for name in names]


def _kept_tensors(model: nn.Module, linears: dict[str, QuantizedLinear]) -> dict[str, Tensor]:
    """Every weight that stays as it is, tied ones under each of their names."""
    inside = {id(linear.weight) for linear in linears.values()}
    inside |= {id(linear.weight_scale) for linear in linears.values()}
    return {
        name: tensor
        for stack_name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) not in inside
        for name, tensor in split_experts(stack_name, parameter.detach())
    }
