"""Linear layers that exist in 8 bit only, and whose weights load 16-bit shards in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import ModelWeightParameter

from flashrl.core.quantize import compute_scale
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm.loading import load_shard
from flashrl.engines.vllm.products import choose_product
from flashrl.engines.vllm.storage import QuantizedStorage, check_blocks
from flashrl.errors import ShapeError

__all__ = ["FlashRLLinearMethod", "QuantizedWeight"]


class QuantizedWeight(ModelWeightParameter):  # type: ignore[misc]
    """The 8-bit weight of a linear layer, as vLLM's loaders see it.

    vLLM calls one of four methods with a checkpoint's tensor and tells where it belongs; each one
    takes this rank's part and hands it to the storage.  It may be called at any time.

    Args:
        storage: Where the weight lives.
    """

    def __init__(self, *, storage: QuantizedStorage, **kwargs: Any) -> None:
        self.storage = storage
        super().__init__(**kwargs)

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """A whole weight, split over ranks by rows."""
        self._load_rows(loaded_weight, 0, self.data.shape[0], self.tp_rank, self.tp_size)

    def load_merged_column_weight(self, loaded_weight: Tensor, **where: Any) -> None:
        """One of several weights that are one layer here, such as gate or up."""
        offset, size = where["shard_offset"], where["shard_size"]
        self._load_rows(loaded_weight, offset, size, self.tp_rank, self.tp_size)

    def load_qkv_weight(self, loaded_weight: Tensor, **where: Any) -> None:
        """q, k or v; ranks share a key-value head where there are fewer heads than ranks."""
        replicas = 1 if where["shard_id"] == "q" else where["num_heads"]
        rank, ranks = self.tp_rank // replicas, self.tp_size // replicas
        self._load_rows(loaded_weight, where["shard_offset"], where["shard_size"], rank, ranks)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """A whole weight, split over ranks by columns."""
        rows, size = self.data.shape
        self._check_shape(loaded_weight, rows, size * self.tp_size)
        part = loaded_weight.narrow(1, self.tp_rank * size, size)
        load_shard(self, self.storage, part, row=0)

    def load_replicated_weight(self, loaded_weight: Tensor) -> None:
        """A whole weight that every rank holds."""
        self._load_rows(loaded_weight, 0, self.data.shape[0], 0, 1)

    def _load_rows(self, tensor: Tensor, row: int, size: int, rank: int, ranks: int) -> None:
        self._check_shape(tensor, size * ranks, self.data.shape[1])
        part = tensor.narrow(0, rank * size, size)
        scale = self._shared_scale(tensor) if ranks > 1 else None
        load_shard(self, self.storage, part, row=row, scale=scale)

    def _check_shape(self, tensor: Tensor, rows: int, columns: int) -> None:
        if tuple(tensor.shape) != (rows, columns):
            raise ShapeError(
                f"{self.storage.name}.weight: expected a shard of shape {(rows, columns)}, "
                f"got {tuple(tensor.shape)}; nothing was written"
            )

    def _shared_scale(self, whole: Tensor) -> Tensor | None:
        """One scale a tensor is that of the whole tensor, however many ranks share it."""
        scheme = self.storage.scheme
        if scheme.strategy != "tensor" or whole.is_meta:
            return None
        return compute_scale(whole, scheme, name=f"{self.storage.name}.weight")


def _load_replicated(
    param: QuantizedWeight, loaded_weight: Tensor, loaded_shard_id: object = None
) -> None:
    param.load_replicated_weight(loaded_weight)


@register_weight_loader_v2_supported_method
class FlashRLLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """How vLLM makes and runs an 8-bit linear layer.

    Args:
        scheme: How weights and activations are quantized.
        name: The layer's name in the engine.
    """

    def __init__(self, scheme: QuantScheme, name: str) -> None:
        self.scheme = scheme
        self.name = name

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` and ``weight_scale`` on a layer."""
        check_blocks(self.name, self.scheme, output_partition_sizes, input_size_per_partition)
        shape = (sum(output_partition_sizes), input_size_per_partition)
        storage = QuantizedStorage.allocate(self.name, self.scheme, shape)
        self.install(layer, storage)

    def install(self, layer: Any, storage: QuantizedStorage) -> None:
        """Put a storage's parameters on a layer.

        Args:
            layer: A linear layer of vLLM's.
            storage: Its 8-bit weight.
        """
        weight = QuantizedWeight(
            data=storage.weight,
            storage=storage,
            input_dim=1,
            output_dim=0,
            weight_loader=getattr(layer, "weight_loader_v2", _load_replicated),
        )
        weight.tp_rank = getattr(layer, "tp_rank", weight.tp_rank)
        weight.tp_size = getattr(layer, "tp_size", weight.tp_size)
        layer.register_parameter("weight", weight)
        # No parameter, since no checkpoint brings it: vLLM's reload counts parameters.
        layer.weight_scale = storage.scale
        self.storages = (storage,)
        self.kernel_name, self.product = choose_product(self.scheme, storage.weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make sure that the layer's parameters are the storage, whatever was swapped for them."""
        (storage,) = self.storages
        storage.check_complete()
        layer.weight.data = storage.weight

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply (..., in) to (..., out)."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.product(flat, layer.weight, layer.weight_scale, bias)
        return y.view(*x.shape[:-1], y.shape[-1])
