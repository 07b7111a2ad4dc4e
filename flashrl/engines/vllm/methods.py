"""Which method a layer of vLLM's gets."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flashrl.core.names import LayerRules
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.entries import lm_head_in_fp32
from flashrl.engines.vllm.kept import FP32HeadMethod, KeptEmbeddingMethod, KeptLinearMethod
from flashrl.engines.vllm.linear import FlashRLLinearMethod
from flashrl.engines.vllm.moe import FlashRLMoEMethod

__all__ = ["choose_method"]


def choose_method(layer: Any, name: str, scheme: QuantScheme, rules: LayerRules) -> Any:
    """The method that makes and runs a layer.

    Args:
        layer: A layer of vLLM's that asks for one.
        name: Its name in the engine.
        scheme: How the engine is quantized.
        rules: Which layers are.

    Returns:
        A method of vLLM's kind, or None where vLLM's default is right.
    """
    compat.follow_weights_on_cpu()
    if isinstance(layer, LinearBase):
        if rules.matches(name, type(layer).__name__):
            return FlashRLLinearMethod(scheme, name)
        return KeptLinearMethod()
    if compat.is_experts(layer):
        name = name.removesuffix(".routed_experts")
        return FlashRLMoEMethod(layer, scheme, name) if rules.matches(name, "FusedMoE") else None
    if isinstance(layer, VocabParallelEmbedding):
        return FP32HeadMethod() if lm_head_in_fp32() else KeptEmbeddingMethod()
    return None
