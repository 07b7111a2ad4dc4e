"""SGLang's own kernels on CUDA, and how each wants to be called."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from flashrl.core.schemes import QuantScheme
from flashrl.errors import UnsupportedError

__all__ = ["moe_quant_info", "moe_runner", "product"]


def product(scheme: QuantScheme) -> tuple[str, Any]:
    """SGLang's kernels for a scheme; see :func:`choose_product`.

    Returns:
        Its name, and the function (activations, weight, scale, bias) → (tokens, out).
    """
    if scheme.type == "int":
        int8_scaled_mm = _find(("sgl_kernel", "int8_scaled_mm"))
        per_token_quant_int8 = _find(
            ("sglang.kernels.ops.quantization.int8_kernel", "per_token_quant_int8"),
            ("sglang.srt.layers.quantization.int8_kernel", "per_token_quant_int8"),
        )

        def int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            values, input_scale = per_token_quant_int8(x.contiguous())
            y: Tensor = int8_scaled_mm(
                values, weight.t(), input_scale, scale, out_dtype=x.dtype, bias=bias
            )
            return y

        return "sgl_kernel int8_scaled_mm", int8
    from sglang.srt.layers.quantization import fp8_utils

    if scheme.block_structure is not None:
        block = list(scheme.block_structure)
        linear = fp8_utils.dispatch_w8a8_block_fp8_linear()

        def blocks(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            y: Tensor = linear(
                input=x.contiguous(), weight=weight, block_size=block, weight_scale=scale, bias=bias
            )
            return y

        return getattr(linear, "__name__", "fp8 block linear"), blocks

    supported = fp8_utils.cutlass_fp8_supported()

    def fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = fp8_utils.apply_fp8_linear(
            x.contiguous(), weight.t(), scale, bias=bias, cutlass_fp8_supported=supported
        )
        return y

    return "apply_fp8_linear", fp8


def moe_runner(config: Any) -> Any:
    """SGLang's fused kernel for experts."""
    from sglang.srt.layers.moe import MoeRunner, MoeRunnerBackend

    return MoeRunner(MoeRunnerBackend.TRITON, config)


def moe_quant_info(
    scheme: QuantScheme, w13: Tensor, w2: Tensor, w13_scale: Tensor, w2_scale: Tensor
) -> Any:
    """What SGLang's fused kernel has to know about 8-bit experts."""
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    block = scheme.block_structure
    return TritonMoeQuantInfo(
        w13_weight=w13,
        w2_weight=w2,
        use_int8_w8a8=scheme.type == "int",
        use_fp8_w8a8=scheme.type == "float",
        per_channel_quant=block is None,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        block_shape=None if block is None else list(block),
    )


def _find(*places: tuple[str, str]) -> Any:
    """A function of SGLang's that moved between versions."""
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise UnsupportedError(f"this version of SGLang has no {places[0][1]}")
