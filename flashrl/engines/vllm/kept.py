"""Layers that stay as they are, made to follow their weights.

On a CPU vLLM multiplies by a packed copy of each 16- or 32-bit matrix, made once after loading; a
later push would not reach it.  Here the copy is left out and the weight itself is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import ModelWeightParameter

__all__ = [
    "FP32HeadMethod",
    "KeptEmbeddingMethod",
    "KeptLinearMethod",
    "register_weight",
    "unpack",
]


class KeptLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer as vLLM has it, without a packed copy."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Multiply by the weight itself."""
        follow(layer)


class KeptEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Embedding and ``lm_head`` as vLLM has them, without a packed copy."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Multiply by the weight itself."""
        follow(layer)


class FP32HeadMethod(KeptEmbeddingMethod):
    """``lm_head`` with logits in float32; nothing is cached, so it follows its weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits, float32."""
        weight = layer.weight
        if x.is_cuda and x.dtype == weight.dtype and x.dtype != torch.float32:
            # 16-bit products are exact in float32, and so is the sum's type: the same logits
            # as after a cast, without the cast.
            logits: Tensor = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return logits if bias is None else logits + bias.float()
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def follow(layer: Any) -> None:
    """Let a layer multiply by its weight itself on a CPU."""
    layer.cpu_linear = F.linear


def unpack(layer: Any) -> None:
    """Undo vLLM's packing of a layer on a CPU: its weight is back, and what is multiplied.

    Args:
        layer: Any layer; one that is not packed stays as it is.
    """
    packed = getattr(layer, "cpu_linear", None)
    if packed is None or packed is F.linear:
        return
    if layer.weight.numel() == 0:
        register_weight(layer, multiplied_by_identity(layer))
    follow(layer)


def register_weight(layer: Any, data: Tensor) -> None:
    """Give a linear layer a 16- or 32-bit weight that loads as vLLM's own does.

    Args:
        layer: A linear layer of vLLM's.
        data: [out, in] of this rank.
    """
    weight = ModelWeightParameter(
        data=data,
        input_dim=1,
        output_dim=0,
        weight_loader=getattr(layer, "weight_loader_v2", layer.weight_loader),
    )
    weight.tp_rank, weight.tp_size = layer.tp_rank, layer.tp_size
    layer.register_parameter("weight", weight)


def multiplied_by_identity(layer: Any) -> Tensor:
    """The weight [out, in] inside a kernel that gave its own copy away.

    Multiplying the identity is exact: every sum has one term that is not zero.
    """
    rows = layer.input_size_per_partition
    identity = torch.eye(rows, dtype=layer.weight.dtype)
    product: Tensor = layer.cpu_linear(identity, layer.weight, None)
    return product.t().contiguous()
