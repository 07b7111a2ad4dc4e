"""The quantizations that SGLang knows by name: which layers each one makes 8-bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from torch import nn

from flashrl.core.names import FUSED, LayerRules
from flashrl.core.profiles import Profile
from flashrl.core.profiles.files import load_profile
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.engines.sglang.entries import require_entry
from flashrl.engines.sglang.linear import FlashRLLinearMethod, KeptLinearMethod
from flashrl.engines.sglang.moe import FlashRLMoEMethod
from flashrl.errors import UnsupportedError

__all__ = ["CONFIGS", "PREFIX", "FlashRLConfig"]

PREFIX = "flashrl"


class FlashRLConfig(QuantizationConfig):  # type: ignore[misc]
    """8-bit layers for a scheme.

    Args:
        scheme: Which one; without it the class's preset, or what FLASHRL_CONFIG says for this
            data-parallel rank.
        profile: Path of a profile.
    """

    preset: ClassVar[str | None] = None

    def __init__(self, scheme: QuantScheme | None = None, profile: str | None = None) -> None:
        super().__init__()
        if scheme is None and self.preset is not None:
            scheme = PRESETS[self.preset]
        if scheme is None:
            entry = require_entry()
            scheme, profile = entry.quant_scheme, entry.profile
        self.scheme = scheme
        self._profile = profile
        self.rules = LayerRules.from_scheme(scheme, fused=FUSED)

    def load_profile(self) -> Profile | None:
        """Read the profile, if there is one.

        Raises:
            ProfileError: It cannot be read.
        """
        return load_profile(self._profile) if self._profile else None

    @classmethod
    def get_name(cls) -> str:
        """The name it is registered under."""
        return f"{PREFIX}_{cls.preset}" if cls.preset else PREFIX

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activations of any 16- or 32-bit type."""
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.9 where it is fp8, 7.5 otherwise."""
        return 89 if cls.preset is not None and PRESETS[cls.preset].type == "float" else 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a checkpoint says nothing about it."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlashRLConfig:
        """Read what :meth:`SGLangAdapter.launch_args` wrote.

        Raises:
            UnsupportedError: The checkpoint is quantized already, by something else.
        """
        if config.get("quant_method") != PREFIX or "scheme" not in config:
            raise UnsupportedError(
                f"the checkpoint is quantized already ({config.get('quant_method')}), and flashrl "
                "quantizes 16-bit weights; load the 16-bit checkpoint"
            )
        return cls(QuantScheme(**config["scheme"]), config.get("profile"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a layer: 8-bit, as it is, or None for SGLang's default."""
        if isinstance(layer, LinearBase):
            if self.rules.matches(prefix, type(layer).__name__):
                return FlashRLLinearMethod(self.scheme, prefix)
            return KeptLinearMethod()
        if isinstance(layer, FusedMoE) and self.rules.matches(prefix, type(layer).__name__):
            return FlashRLMoEMethod(self.scheme, prefix)
        return None

    def get_scaled_act_names(self) -> list[str]:
        """None."""
        return []


class Int8Config(FlashRLConfig):
    """``flashrl_int8``."""

    preset = "int8"


class Fp8ChannelConfig(FlashRLConfig):
    """``flashrl_fp8_channel``."""

    preset = "fp8_channel"


class Fp8TensorConfig(FlashRLConfig):
    """``flashrl_fp8_tensor``."""

    preset = "fp8_tensor"


class Fp8BlockConfig(FlashRLConfig):
    """``flashrl_fp8_block``."""

    preset = "fp8_block"


CONFIGS: Mapping[str, type[FlashRLConfig]] = {
    config.get_name(): config
    for config in (FlashRLConfig, Int8Config, Fp8ChannelConfig, Fp8TensorConfig, Fp8BlockConfig)
}
"""Every quantization that is registered, by its name in SGLang."""
