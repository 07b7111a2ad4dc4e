"""Linear layers that exist in 8 bit only."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang.products import choose_product
from flashrl.engines.sglang.storage import QuantizedParameter, QuantizedStorage
from flashrl.errors import UnsupportedError

__all__ = ["FlashRLLinearMethod", "KeptLinearMethod", "refuse_split_scale", "register_scale"]


class KeptLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A 16-bit linear layer that follows its weight: no packed copy is made of it."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing; SGLang would pack the weight here on a CPU with AMX, and a push would miss."""


class FlashRLLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """How SGLang makes and runs an 8-bit linear layer.

    Args:
        scheme: How weights and activations are quantized.
        name: The layer's name in the engine.
    """

    def __init__(self, scheme: QuantScheme, name: str) -> None:
        self.scheme = scheme
        self.name = name

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` and ``weight_scale`` on a layer."""
        refuse_split_scale(self.name, self.scheme, split=sum(output_partition_sizes) < output_size)
        storage = QuantizedStorage.allocate(
            self.name, self.scheme, output_partition_sizes, input_size_per_partition
        )
        self.install(layer, storage, extra_weight_attrs.get("weight_loader"))

    def install(self, layer: nn.Module, storage: QuantizedStorage, weight_loader: Any) -> None:
        """Put a storage's parameters on a layer.

        Args:
            layer: A linear layer of SGLang's.
            storage: Its 8-bit weight.
            weight_loader: What SGLang calls with a checkpoint's tensor.
        """
        weight = QuantizedParameter(storage)
        weight.input_dim, weight.output_dim = 1, 0  # type: ignore[attr-defined]
        weight.weight_loader = weight_loader  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)
        register_scale(layer, "weight_scale", storage.scale)
        self.storage = storage
        self.product = choose_product(self.scheme, storage.weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is left to do, however often it is called."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply (..., in) to (..., out), in the dtype of ``x``."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.product.multiply(flat, self.storage.weight, self.storage.scale, bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def refuse_split_scale(name: str, scheme: QuantScheme, *, split: bool) -> None:
    """Refuse one scale a tensor where each rank sees only some of the tensor's rows.

    Raises:
        UnsupportedError: ``split`` is true and the scheme has one scale a tensor.
    """
    if split and scheme.strategy == "tensor":
        raise UnsupportedError(
            f"{name}: {scheme.name} has one scale a tensor, and tensor parallelism gives each rank "
            "some of its rows; use fp8_channel, which no split changes"
        )


def register_scale(layer: nn.Module, name: str, scale: Tensor) -> None:
    """Register a scale that no checkpoint may bring."""
    parameter = nn.Parameter(scale, requires_grad=False)
    parameter.weight_loader = _refuse_scale  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def _refuse_scale(parameter: Tensor, loaded_weight: Tensor, *_: object) -> None:
    raise UnsupportedError(
        "the checkpoint brings a weight_scale, and flashrl computes its own from 16-bit weights; "
        "load the 16-bit checkpoint"
    )
