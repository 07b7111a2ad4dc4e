"""Making the layers of a running 16-bit model 8-bit, and 16-bit again."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import ModelWeightParameter

from flashrl.core.names import FUSED, LayerRules
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.kept import FP32HeadMethod, unpack
from flashrl.engines.vllm.linear import FlashRLLinearMethod
from flashrl.engines.vllm.quantization import lm_head_in_fp32
from flashrl.engines.vllm.storage import QuantizedStorage, check_blocks
from flashrl.errors import SchemeError, UnsupportedError

__all__ = ["Converted", "convert", "convert_back"]


@attrs.frozen
class Converted:
    """A layer that was made 8-bit, and what it was.

    Args:
        layer: The layer.
        method: vLLM's own method for it.
        dtype: dtype of its weight.
    """

    layer: Any
    method: Any
    dtype: torch.dtype


def convert(model: nn.Module, scheme: QuantScheme, worker: Any) -> list[Converted]:
    """Quantize the linears of a model that runs, and free their 16-bit weights.

    Args:
        model: vLLM's model.
        scheme: How.
        worker: vLLM's worker, whose graphs may have to be captured again.

    Returns:
        What :func:`convert_back` needs.

    Raises:
        SchemeError: The scheme does not fit a layer; nothing was changed.
        UnsupportedError: The engine cannot change any more; nothing was changed.
    """
    compat.check_convertible(worker)
    rules = LayerRules.from_scheme(
        scheme, fused={**FUSED, **getattr(model, "packed_modules_mapping", {})}
    )
    chosen = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase) and rules.matches(name, type(layer).__name__)
    ]
    _check(chosen, scheme)
    _refuse_experts(model, rules, scheme)
    compat.follow_weights_on_cpu()
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            unpack(layer)
            layer.flashrl_follows = True
        if isinstance(layer, VocabParallelEmbedding) and lm_head_in_fp32():
            layer.quant_method = FP32HeadMethod()
    with compat.engine_context(worker):
        converted = [_convert_linear(name, layer, scheme) for name, layer in chosen]
    compat.after_conversion(model, worker)
    return converted


def convert_back(converted: list[Converted], model: nn.Module) -> None:
    """Give layers their 16-bit weights back, dequantized.

    Raises:
        UnsupportedError: The engine was started in 8 bit.
    """
    if not converted:
        raise UnsupportedError(
            "the engine was started in 8 bit, so it has no 16-bit layers to go back to; "
            "start another engine"
        )
    for item in converted:
        layer: Any = item.layer
        (storage,) = layer.quant_method.storages
        whole = storage.read(slice(0, storage.weight.shape[0]))
        weight = ModelWeightParameter(
            data=whole.to(item.dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=getattr(layer, "weight_loader_v2", layer.weight_loader),
        )
        weight.tp_rank, weight.tp_size = layer.tp_rank, layer.tp_size
        del layer.weight_scale
        layer.register_parameter("weight", weight)
        layer.quant_method = item.method
    compat.forget_reload(model)


def _check(chosen: list[tuple[str, nn.Module]], scheme: QuantScheme) -> None:
    if not chosen:
        raise SchemeError(f"scheme {scheme.name!r} matches no linear layer of the model")
    for name, layer in chosen:
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            raise UnsupportedError(
                f"{name} is quantized already ({type(layer.quant_method).__name__}); start the "
                "engine from the 16-bit checkpoint, without a quantization argument"
            )
        check_blocks(name, scheme, _partitions(layer), _columns(layer))


def _refuse_experts(model: nn.Module, rules: LayerRules, scheme: QuantScheme) -> None:
    for name, module in model.named_modules():
        name = name.removesuffix(".routed_experts")
        if compat.is_experts(module) and rules.matches(name, "FusedMoE"):
            raise UnsupportedError(
                f"{name}: experts can not be made 8-bit while the engine runs; start it with "
                f"LLM(model, **flashrl.launch_args('vllm', {scheme.name!r})), or set FLASHRL_CONFIG"
            )


def _convert_linear(name: str, layer: Any, scheme: QuantScheme) -> Converted:
    weight = layer.weight.data
    storage = QuantizedStorage.allocate(name, scheme, tuple(weight.shape), device=weight.device)
    row = 0
    for rows in _partitions(layer):
        part = weight.narrow(0, row, rows)
        storage.load(part, row=row, scale=_shared_scale(part, layer, scheme))
        row += rows
    method = FlashRLLinearMethod(scheme, name)
    result = Converted(layer=layer, method=layer.quant_method, dtype=weight.dtype)
    method.install(layer, storage)
    layer.quant_method = method
    return result


def _partitions(layer: Any) -> list[int]:
    return list(layer.output_partition_sizes)


def _columns(layer: Any) -> int:
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def _shared_scale(part: Tensor, layer: Any, scheme: QuantScheme) -> Tensor | None:
    """One scale a tensor, over all ranks that hold rows of it."""
    split = isinstance(layer, ColumnParallelLinear) and layer.tp_size > 1
    if scheme.strategy != "tensor" or not split:
        return None
    amax = part.abs().amax().float().reshape(1)
    torch.distributed.all_reduce(
        amax, torch.distributed.ReduceOp.MAX, group=compat.tensor_parallel_group()
    )
    return torch.where(amax == 0, 1.0, amax / scheme.qmax)
