"""Everything that differs between versions of vLLM, and the few places where it is patched.

Written for 0.24 and 0.27 to 0.32.  A newer version runs with a warning if what is used here is
still there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from flashrl.core.config import load_config
from flashrl.core.schemes import QuantScheme
from flashrl.errors import EngineStateError, UnsupportedError

__all__ = [
    "PREFIX",
    "add_worker_method",
    "after_conversion",
    "after_start",
    "check_convertible",
    "cpu_select_experts",
    "cuda_experts",
    "cuda_product",
    "data_parallel_rank",
    "engine_context",
    "follow_weights_on_cpu",
    "forget_reload",
    "has_lora",
    "inject_engine_args",
    "is_attention",
    "is_experts",
    "is_reloading",
    "is_shut_down",
    "leave_process_groups",
    "reads_cache_scales",
    "restore_engine_args",
    "restore_sampler",
    "settle_reload",
    "tensor_parallel_group",
    "unseeded_draws_are_biased",
    "use_processed_log_probs",
    "watch_models",
]

logger = logging.getLogger(__name__)

PREFIX = "flashrl"
"""What the names of our quantizations begin with."""


def cuda_product(scheme: QuantScheme) -> tuple[str, Any]:
    """VLLM's kernels for a scheme on CUDA; see :func:`choose_product`."""
    from vllm import _custom_ops as ops

    if scheme.type == "int":

        def int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            values, input_scale, _ = ops.scaled_int8_quant(x.contiguous(), None, None)
            y: Tensor = ops.cutlass_scaled_mm(values, weight.t(), input_scale, scale, x.dtype, bias)
            return y

        return "cutlass_scaled_mm int8", int8
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    if scheme.strategy == "block":
        raise UnsupportedError(
            f"scheme {scheme.name!r}: scales by blocks run on a CPU only; use fp8_channel on CUDA"
        )
    shape = GroupShape.PER_TENSOR if scheme.input_strategy == "tensor" else GroupShape.PER_TOKEN
    quantize = QuantFP8(static=False, group_shape=shape)

    def fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        values, input_scale = quantize(x)
        y: Tensor = ops.cutlass_scaled_mm(values, weight.t(), input_scale, scale, x.dtype, bias)
        return y

    return "cutlass_scaled_mm fp8", fp8


@functools.cache
def follow_weights_on_cpu() -> None:
    """Keep vLLM from packing copies of 16-bit matrices in engines of ours, on a CPU.

    Some layers (a router, say) never ask a quantization for their method, so the function that
    packs is wrapped: it does what it did in every other engine.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    pack = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(pack)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        from flashrl.engines.vllm.kept import follow

        if is_ours():
            layer.flashrl_follows = True
        if getattr(layer, "flashrl_follows", False):
            follow(layer)
        else:
            pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    logger.info("16-bit layers of flashrl engines multiply by their weights, not by packed copies")


def is_ours() -> bool:
    """Whether the engine that is being built is 8-bit, or 16-bit because FLASHRL_CONFIG says so."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return False
    return _is_quantization_of_ours(config.quant_config) or load_config() is not None


def _is_quantization_of_ours(config: Any) -> bool:
    return config is not None and str(config.get_name()).startswith(PREFIX)


@functools.cache
def watch_models() -> None:
    """Let a quantization of ours see each model that is built for it, before its weights come."""
    from vllm.model_executor.model_loader import base_loader

    build = base_loader.initialize_model

    @functools.wraps(build)
    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = build(vllm_config, *args, **kwargs)
        config, main = vllm_config.quant_config, vllm_config.model_config
        # A draft model has a configuration of its own.
        if _is_quantization_of_ours(config) and kwargs.get("model_config", main) is main:
            config.receive(model, main)
        return model

    base_loader.initialize_model = initialize_model
    logger.info("models of flashrl engines take their weights through flashrl")


def add_worker_method(answer: Callable[..., Any]) -> None:
    """Let every worker answer ``collective_rpc("flashrl", ...)``; idempotent.

    vLLM's own place for it, ``worker_extension_cls``, holds one class, and trainers use it.

    Args:
        answer: (worker, operation, ...) → what the call returns.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase, "flashrl"):
        WorkerBase.flashrl = answer


def check_convertible(worker: Any) -> None:
    """Make sure that a running engine can change its layers.

    Raises:
        UnsupportedError: Its model is compiled; the message says how to start it.
    """
    from vllm.config import CompilationMode

    mode = worker.vllm_config.compilation_config.mode
    if mode != CompilationMode.NONE:
        raise UnsupportedError(
            f"the engine's model is compiled (mode {mode.name}), so its layers can not change any "
            "more; start it in 8 bit with LLM(model, **flashrl.launch_args('vllm', scheme)), or "
            "set FLASHRL_CONFIG, or start it with enforce_eager=True"
        )


def engine_context(worker: Any) -> AbstractContextManager[Any]:
    """The context in which vLLM makes layers of an engine."""
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[Any] = set_current_vllm_config(worker.vllm_config)
    return context


def after_conversion(model: nn.Module, worker: Any) -> None:
    """Let vLLM know that a model's parameters are others now: reload, graphs."""
    forget_reload(model)
    graphs = worker.vllm_config.compilation_config.cudagraph_mode
    if worker.device.type == "cuda" and graphs is not None and graphs.name != "NONE":
        worker.model_runner.capture_model()


def forget_reload(model: nn.Module) -> None:
    """Let vLLM's layerwise reload start from the parameters that the model has now."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model)


def is_experts(layer: Any) -> bool:
    """Whether a layer holds the experts of a mixture."""
    return any(kind.__name__ in ("RoutedExperts", "FusedMoE") for kind in type(layer).__mro__)


def is_attention(layer: Any) -> bool:
    """Whether a layer keeps keys and values in a cache, with scales of its own."""
    return hasattr(layer, "_k_scale") and hasattr(layer, "kv_cache_dtype")


def reads_cache_scales(layer: Any) -> bool:
    """Whether an attention layer's kernels read its scales at each step.

    FlashInfer takes them as numbers, which a CUDA graph keeps as they were.
    """
    backend = layer.attn_backend.get_name()
    return layer._k_scale.device.type != "cuda" or backend in ("FLASH_ATTN", "TRITON_ATTN")


def has_lora() -> bool:
    """Whether the engine that is being built takes LoRA adapters."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.lora_config is not None


def cpu_select_experts() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """How a CPU routes tokens, where vLLM leaves that to the experts (before 0.32).

    Returns:
        vLLM's function; None where its router does the routing, or on CUDA.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    experts = "vllm.model_executor.layers.fused_moe"
    if importlib.util.find_spec(f"{experts}.router.cpu_router"):
        return None
    old = f"{experts}.cpu_fused_moe"
    module = importlib.import_module(
        old if importlib.util.find_spec(old) else f"{experts}.experts.cpu_moe"
    )
    select: Callable[..., tuple[Tensor, Tensor]] = module.select_experts
    return select


def cuda_experts(scheme: QuantScheme, layer: Any) -> Any:
    """VLLM's Triton kernel for quantized experts on CUDA.

    Args:
        scheme: How weights and activations are quantized.
        layer: The experts, with ``w13_weight``, ``w2_weight`` and their scales.

    Returns:
        (x, topk_weights, topk_ids) → weighted sum of the experts.
    """
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    config = FusedMoEQuantConfig.make(
        scheme.dtype,
        w1_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
        per_act_token_quant=scheme.input_strategy == "token",
        per_out_ch_quant=scheme.type == "float",
    )

    def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        y: Tensor = fused_experts(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=getattr(layer, "expert_map", None),
            quant_config=config,
        )
        return y

    return experts


def is_shut_down(client: Any) -> bool:
    """Whether an engine has ended.

    Args:
        client: What an engine holds as ``engine_core``.
    """
    finalizer = getattr(client, "_finalizer", None)
    if finalizer is not None:
        return not finalizer.alive or bool(
            getattr(getattr(client, "resources", None), "engine_dead", False)
        )
    # In this process, before 0.32.
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    return not model_parallel_is_initialized()


def is_reloading(model: nn.Module) -> bool:
    """Whether a layerwise reload of vLLM's own is under way, which counts what its loaders copy."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return bool(get_layerwise_info(model).can_load())


def settle_reload(model: nn.Module) -> None:
    """Take vLLM's reload wrappers off parameters that a reload left behind.

    After a reload that brings nothing for a layer, vLLM forgets to unwrap the loader of its bias,
    and the next load of that bias is dropped without a word.

    Raises:
        EngineStateError: A reload is under way.
    """
    for parameter in model.parameters():
        if parameter.is_meta:
            raise EngineStateError(
                "a weight update through vLLM's own reload is under way; finish it first"
            )
        loader: Any = getattr(parameter, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = loader.__wrapped__
            parameter.weight_loader = loader  # type: ignore[attr-defined]


def leave_process_groups() -> None:
    """Let another engine start in this process after one that has ended."""
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()


def tensor_parallel_group() -> Any:
    """The process group that shares a layer."""
    from vllm.distributed import get_tp_group

    return get_tp_group().device_group


def data_parallel_rank() -> int:
    """This process's rank among the engines that share the data."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return 0
    parallel = config.parallel_config
    # Engines of a dense model count as single ones; their index still tells them apart.
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def inject_engine_args() -> None:
    """Let FLASHRL_CONFIG set the engine arguments of every engine that starts; idempotent."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "flashrl_original"):
        return

    @functools.wraps(original)
    def create_engine_config(args: Any, *positional: Any, **keywords: Any) -> Any:
        from flashrl.engines.vllm.arguments import configure

        configure(args)
        return original(args, *positional, **keywords)

    create_engine_config.flashrl_original = original  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
    logger.info("FLASHRL_CONFIG sets the engine arguments of vLLM engines")


def after_start(action: Callable[[Any], None]) -> None:
    """Let something look at every ``LLMEngine`` when it has started; idempotent."""
    from vllm.v1.engine.llm_engine import LLMEngine

    start = LLMEngine.from_engine_args.__func__
    if hasattr(start, "flashrl_original"):
        return

    @functools.wraps(start)
    def from_engine_args(cls: Any, *args: Any, **kwargs: Any) -> Any:
        engine = start(cls, *args, **kwargs)
        action(engine)
        return engine

    from_engine_args.flashrl_original = start  # type: ignore[attr-defined]
    LLMEngine.from_engine_args = classmethod(from_engine_args)
    logger.info("FLASHRL_TEST_RELOAD pushes models into every engine that starts")


def restore_engine_args() -> None:
    """Undo :func:`inject_engine_args`."""
    from vllm.engine.arg_utils import EngineArgs

    patched = EngineArgs.create_engine_config
    EngineArgs.create_engine_config = getattr(patched, "flashrl_original", patched)


def use_processed_log_probs(worker: Any) -> Any:
    """Let a running worker report log-probabilities of the distribution that it samples.

    Args:
        worker: vLLM's worker.

    Returns:
        The sampler that was in use, for :func:`restore_sampler`; None if nothing had to change.
    """
    from vllm.v1.sample.sampler import Sampler

    config, runner = worker.vllm_config.model_config, worker.model_runner
    sampler: Any = getattr(runner, "sampler", None)
    if config.logprobs_mode == "processed_logprobs" or type(sampler) is not Sampler:
        return None
    config.logprobs_mode = "processed_logprobs"
    runner.sampler = Sampler(logprobs_mode="processed_logprobs")
    return sampler


def unseeded_draws_are_biased() -> bool:
    """Whether draws without a seed of their own come from another distribution than reported.

    On a CPU before 0.32, vLLM drew them with compiled noise whose windows overlap (vllm#59786).
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    used = TopKTopPSampler.forward_cpu.__code__.co_names
    return bool(current_platform.is_cpu()) and "compiled_random_sample" in used


def restore_sampler(worker: Any, sampler: Any) -> None:
    """Undo :func:`use_processed_log_probs`."""
    if sampler is not None:
        worker.vllm_config.model_config.logprobs_mode = sampler.logprobs_mode
        worker.model_runner.sampler = sampler
