"""The swap: a model's linears become 8-bit, and every weight keeps its checkpoint name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import cast

import attrs
import torch
from torch import Tensor, nn

from flashrl.core.interfaces import WeightInfo
from flashrl.core.names import LayerRules, NameIndex
from flashrl.core.profiles import Profile
from flashrl.core.profiles.smoothing import Smoothing
from flashrl.core.quantize import dequantize
from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.halves import Halves, is_half, weight_of
from flashrl.core.updates.pushes import EXPERT_LAYOUTS, ExpertLayout, split_experts
from flashrl.core.updates.verify import make_pruner
from flashrl.engines.huggingface.layers import (
    QuantizedExperts,
    QuantizedLinear,
    is_stacked_experts,
)
from flashrl.errors import FlashRLError, NonFiniteError, SchemeError, UnsupportedError

__all__ = ["Conversion"]


class Conversion:
    """A model's 8-bit layers, and the way back.

    Args:
        model: Its linears are replaced in place, from the weights they hold.
        scheme: How they are stored, and which ones.
        profile: Smoothing factors and static scales, applied to whatever is loaded.

    Raises:
        SchemeError: The scheme fits no layer, or wants static scales that the profile lacks; the
            model is as it was.
        ProfileError: The profile does not fit the model; the model is as it was.
        NonFiniteError: A weight of the model holds NaN or infinity; the model is as it was.

    Attributes:
        linears: Every 8-bit linear, by the name of its weight.
        infos: Every tensor of a full update, by checkpoint name.
    """

    def __init__(
        self, model: nn.Module, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> None:
        if profile is not None:
            profile.check({name: p.shape for name, p in model.named_parameters()})
        self._model = model
        self._profile = profile
        self._originals = dict(_convertible(model, scheme))
        if scheme.quantized and not self._originals:
            raise SchemeError(
                f"scheme {scheme.name!r} fits no layer of {type(model).__name__}: "
                f"targets {list(scheme.targets)}, ignore {list(scheme.ignore)}"
            )
        self._updated: set[str] = set()
        self._pushed: dict[str, Tensor] = {}
        self._halves = Halves()
        for name, module in self._originals.items():
            model.set_submodule(name, _make_quantized(module, scheme))
        self.linears = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        self._kept = _kept_tensors(model, self.linears)
        self.infos = self._compute_infos()
        self._index = NameIndex(self.infos)
        self._pruner = make_pruner(self.infos)
        try:
            self._load_originals(scheme)
        except FlashRLError:
            self.undo()
            raise

    def load(self, name: str, tensor: Tensor) -> None:
        """Put one tensor in place: 16-bit, or half of a weight that a sender quantized.

        Raises:
            NonFiniteError: It holds NaN or infinity; nothing was written.
            FlashRLError: It is a half, and does not fit.
        """
        weight = weight_of(name)
        if is_half(name, tensor):
            try:
                if not self._take_half(name, tensor, weight):
                    return
            except FlashRLError as error:
                raise type(error)(f"{name} {error}") from error
        else:
            self._put(name, tensor)
            self._halves.forget(name)
        if weight in self.linears:
            self._forget_original(weight)

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
                self._dequantize_into(name, original)
            self._model.set_submodule(name, original)
        for name, tensor in self._pushed.items():
            self._kept[name].copy_(tensor)

    def _put(self, name: str, tensor: Tensor) -> None:
        smoothing = self._smoothing_for(name)
        ready = tensor if smoothing is None else smoothing.apply(tensor, dtype=torch.float32)
        linear = self.linears.get(name)
        if linear is not None:
            linear.load(ready, name=name)
        elif torch.isfinite(ready).all():
            if smoothing is not None or self._pruner is not None:
                self._pushed[name] = tensor.clone()
            self._kept[name].copy_(ready)
        else:
            raise NonFiniteError(f"{name} holds NaN or infinity; nothing was written")
        self._prune(name, self._kept[name] if linear is None else linear.weight)

    def _take_half(self, name: str, tensor: Tensor, weight: str) -> bool:
        """Take values or scale; whether the weight is in place."""
        linear = self.linears.get(weight)
        if linear is None:
            raise SchemeError("is quantized, and the engine keeps this weight in 16 bit")
        if self._smoothing_for(weight) is not None or not linear.scheme.dynamic:
            raise UnsupportedError(
                "was quantized by the sender, and the engine's profile has a say in that; push it "
                "in 16 bit, or attach without the profile"
            )
        shape = self.infos[weight].shape
        both = self._halves.take(name, tensor, weight=weight, shape=shape, scheme=linear.scheme)
        if both is None:
            return False
        linear.take(*both)
        self._prune(weight, linear.weight)
        return True

    def _prune(self, name: str, held: Tensor) -> None:
        for norm, weight in self._pruner.load(name, held).items() if self._pruner else ():
            self._kept[self._index.resolve(norm)].copy_(weight)

    def _smoothing_for(self, name: str) -> Smoothing | None:
        return self._profile.smoothing_for(name) if self._profile is not None else None

    def _load_originals(self, scheme: QuantScheme) -> None:
        if not scheme.dynamic:
            self._load_static_scales(scheme)
        for module_name, module in self._originals.items():
            for name, parameter in module.named_parameters(prefix=module_name):
                for weight_name, tensor in split_experts(name, parameter.detach()):
                    if weight_name in self.linears:
                        self._put(weight_name, tensor)
        for name, tensor in self._kept.items():
            if self._pruner is not None or self._smoothing_for(name) is not None:
                self._put(name, tensor.clone())

    def _load_static_scales(self, scheme: QuantScheme) -> None:
        for name, linear in self.linears.items():
            scale = self._profile.scale_for(name) if self._profile is not None else None
            if scale is None:
                raise SchemeError(
                    f"scheme {scheme.name!r} has static scales, and the profile has none for "
                    f"{name}; pass a profile that has, or a dynamic scheme"
                )
            linear.weight_scale.data.copy_(scale)

    def _forget_original(self, weight_name: str) -> None:
        """Free the 16-bit values that an update has made stale."""
        module_name = weight_name.removesuffix(".weight")
        while module_name not in self._originals:
            module_name = module_name.rpartition(".")[0]
        if module_name not in self._updated:
            self._updated.add(module_name)
            for parameter in _weights_of(self._originals[module_name]):
                parameter.data = parameter.data.new_empty(0)

    def _dequantize_into(self, name: str, original: nn.Module) -> None:
        """Give a 16-bit module, whose values were freed, those of the 8-bit one."""
        if isinstance(original, nn.Linear):
            restored = [self._read_unsmoothed(f"{name}.weight")]
        else:
            experts = cast(QuantizedExperts, self._model.get_submodule(name))
            gates, ups, downs = (
                torch.stack(
                    [
                        self._read_unsmoothed(f"{name}.{index}.{projection}.weight")
                        for index in range(experts.num_experts)
                    ]
                )
                for projection in ("gate_proj", "up_proj", "down_proj")
            )
            restored = [torch.cat([gates, ups], dim=1), downs]
        for parameter, value in zip(_weights_of(original), restored, strict=True):
            parameter.data = value.to(parameter.dtype)

    def _read_unsmoothed(self, name: str) -> Tensor:
        values = self.read(name)
        smoothing = self._smoothing_for(name)
        if smoothing is not None and smoothing.columns is not None:
            values.div_(smoothing.columns.to(values.device))
        if smoothing is not None and smoothing.rows is not None:
            values.mul_(smoothing.rows.to(values.device)[:, None])
        return values

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
        layout = EXPERT_LAYOUTS.get(getattr(self._model.config, "model_type", ""), ExpertLayout())
        return {
            name: attrs.evolve(info, aliases=(*info.aliases, *_names_on_disk(name, layout)))
            for name, info in infos.items()
        }


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


def _make_quantized(module: nn.Module, scheme: QuantScheme) -> nn.Module:
    """The 8-bit module that takes a 16-bit module's place, empty."""
    if isinstance(module, nn.Linear):
        return QuantizedLinear(
            module.out_features,
            module.in_features,
            scheme,
            bias=module.bias,
            device=module.weight.device,
        )
    return QuantizedExperts(module, scheme)


def _names_on_disk(name: str, layout: ExpertLayout) -> Iterator[str]:
    """What the checkpoint calls a tensor, where that is not what the model calls it."""
    on_disk = name.replace(".mlp.", f".{layout.block}.")
    if ".experts." in name:
        for ours, theirs in (
            ("gate_proj", layout.gate),
            ("up_proj", layout.up),
            ("down_proj", layout.down),
        ):
            on_disk = on_disk.replace(f".{ours}.", f".{theirs}.")
    if on_disk != name:
        yield on_disk


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
