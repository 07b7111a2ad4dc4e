"""Dead channels of vLLM's norms; see :mod:`flashrl.core.profiles.pruning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashrl.core.interfaces import WeightInfo
from flashrl.core.names import LayerRules, canonical
from flashrl.core.profiles import Profile
from flashrl.core.quantize import quantize_into
from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.verify import make_pruner

__all__ = ["Pruner"]


class Pruner:
    """Which norms an update has to write, with their dead channels zero.

    It quantizes whole readers by itself, for a rank may hold some of their rows only.

    Args:
        scheme: One that prunes.
        shapes: Names and shapes of the checkpoint.
        profile: Where static scales come from.
    """

    def __init__(
        self,
        scheme: QuantScheme,
        shapes: Mapping[str, tuple[int, ...]],
        profile: Profile | None = None,
    ) -> None:
        rules = LayerRules.from_scheme(scheme)
        infos = {
            name: WeightInfo(
                shape=shape,
                dtype=torch.float32,
                scheme=scheme if len(shape) > 1 and rules.matches(name) else None,
            )
            for name, shape in shapes.items()
        }
        pruner = make_pruner(infos)
        assert pruner is not None  # the scheme prunes
        self._pruner = pruner
        self._quantized = {canonical(n) for n, info in infos.items() if info.scheme is not None}
        self._readers = {reader for readers in pruner.groups.values() for reader in readers}
        self._scheme, self._profile = scheme, profile
        self._spelling: dict[str, str] = {}
        self._norms: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> bool:
        """Look at a 16-bit tensor, smoothed; True for a norm, which :meth:`norms` will bring."""
        key = canonical(name)
        if key in self._pruner.groups and tensor.ndim == 1:
            self._spelling[key] = name
            self._note(key, tensor)
            return True
        if key in self._readers:
            quantized = key in self._quantized
            self._note(key, self._quantize(name, tensor) if quantized else tensor)
        return False

    def take_values(self, name: str, values: Tensor) -> None:
        """Look at a weight that was quantized already."""
        self._note(canonical(name), values)

    def norms(self) -> dict[str, Tensor]:
        """The norms to write now, by the names they were pushed under."""
        norms, self._norms = self._norms, {}
        return {self._spelling[name]: weight for name, weight in norms.items()}

    def _note(self, key: str, tensor: Tensor) -> None:
        self._norms.update(self._pruner.load(key, tensor))

    def _quantize(self, name: str, weight: Tensor) -> Tensor:
        values = torch.empty(weight.shape, dtype=self._scheme.dtype, device=weight.device)
        scale: Any = None
        if not self._scheme.dynamic and self._profile is not None:
            scale = self._profile.scale_for(name)
        if scale is None:
            scale = torch.empty(self._scheme.scale_shape(weight.shape))
        quantize_into(weight, values, scale.to(weight.device), scheme=self._scheme, name=name)
        return values
