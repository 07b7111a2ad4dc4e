"""The quantizations that vLLM knows by name: which layers each one makes 8-bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from flashrl.core.names import FUSED, LayerRules
from flashrl.core.profiles.files import load_profile
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.checkpoint_names import read_contents
from flashrl.engines.vllm.entries import entry_of_rank
from flashrl.errors import ConfigError, UnsupportedError

__all__ = ["FlashRLConfig", "register"]

_READABLE = ("int-quantized", "float-quantized", "naive-quantized")


class FlashRLConfig(QuantizationConfig):  # type: ignore[misc]
    """8-bit layers for a scheme.

    Args:
        scheme: Which one; the class's preset without it.
        profile: Path of a profile.
    """

    preset: ClassVar[str | None] = None

    def __init__(self, scheme: QuantScheme | None = None, profile: str | None = None) -> None:
        super().__init__()
        if scheme is None and self.preset is not None:
            scheme = PRESETS[self.preset]
        self._scheme, self._profile = scheme, profile
        compat.watch_models()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come to be in a worker's process."""
        self.__dict__.update(state)
        compat.watch_models()

    @property
    def scheme(self) -> QuantScheme:
        """The scheme of this process: given, or its data-parallel rank's in FLASHRL_CONFIG."""
        if self._scheme is None:
            entry = entry_of_rank()
            if entry is None:
                raise ConfigError(
                    "the engine was started with quantization='flashrl', whose scheme stands in "
                    "FLASHRL_CONFIG, and that is not set in this process"
                )
            self._scheme, self._profile = entry.quant_scheme, entry.profile
        return self._scheme

    def receive(self, model: nn.Module, model_config: Any) -> None:
        """Stand in the place of a new model's ``load_weights``.

        Args:
            model: vLLM's model, without weights.
            model_config: vLLM's ``ModelConfig``.

        Raises:
            ProfileError: The profile cannot be read.
            UnsupportedError: The scales of an FP8 KV cache cannot follow this model's weights.
        """
        from flashrl.engines.vllm.intake import Intake
        from flashrl.engines.vllm.kv_cache import CacheScales

        scheme = self.scheme  # says which profile
        Intake(
            model,
            scheme,
            contents=functools.partial(read_contents, model_config),
            profile=load_profile(self._profile) if self._profile else None,
            cache=CacheScales.of(model, scheme),
        )

    def get_name(self) -> str:
        """The name it is registered under."""
        return f"{compat.PREFIX}_{self.preset}" if self.preset else compat.PREFIX

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Activations of any 16- or 32-bit type."""
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 7.5 for int8, 8.9 for fp8."""
        return 89 if cls.preset is not None and PRESETS[cls.preset].type == "float" else 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a checkpoint says nothing about it."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, **_: Any
    ) -> str | None:
        """Take a checkpoint of compressed-tensors, if the user asks for this quantization."""
        own = f"{compat.PREFIX}_{cls.preset}" if cls.preset else compat.PREFIX
        theirs = hf_quant_cfg.get("quant_method")
        return own if user_quant == own and theirs == "compressed-tensors" else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlashRLConfig:
        """Read what :func:`flashrl.engines.vllm.arguments.scheme_to_dict` wrote.

        Raises:
            UnsupportedError: The checkpoint is quantized already, in a way that is not read here.
        """
        if config.get("quant_method") == compat.PREFIX:
            return cls(QuantScheme(**config["scheme"]), config.get("profile"))
        if config.get("format") in _READABLE:
            return cls()
        raise UnsupportedError(
            f"the checkpoint is quantized already ({config.get('quant_method')}, format "
            f"{config.get('format')}); load a 16-bit one, or one of compressed-tensors in the "
            f"format {' or '.join(_READABLE)}"
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a layer: 8-bit, or kept as it is."""
        from flashrl.engines.vllm.methods import choose_method

        rules = LayerRules.from_scheme(
            self.scheme, fused={**FUSED, **(self.packed_modules_mapping or {})}
        )
        return choose_method(layer, prefix, self.scheme, rules)


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


def register() -> None:
    """Make the quantizations known to vLLM; idempotent."""
    for config in (FlashRLConfig, Int8Config, Fp8ChannelConfig, Fp8TensorConfig, Fp8BlockConfig):
        name = f"{compat.PREFIX}_{config.preset}" if config.preset else compat.PREFIX
        register_quantization_config(name)(config)
