"""The kernels that multiply: vLLM's own on CUDA, torch's on a CPU.

None keeps anything derived from the weight: what was quantized last is what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashrl.core.quantize import dequantize
from flashrl.core.quantize.activations import quantize_activations
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.errors import UnsupportedError

__all__ = ["Product", "choose_product"]

Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(activations (tokens, in), weight [out, in], scale, bias or None) → (tokens, out)."""


def choose_product(scheme: QuantScheme, device: torch.device) -> tuple[str, Product]:
    """The product for a scheme on a device, and what ``describe()`` calls it.

    Raises:
        UnsupportedError: vLLM has no kernel for it there.
    """
    if device.type == "cuda":
        return compat.cuda_product(scheme)
    if device.type != "cpu":
        raise UnsupportedError(
            f"flashrl runs vLLM on CUDA and CPU, not on {device.type}; use a 16-bit engine there"
        )
    name, multiply = _choose_cpu_product(scheme)
    key = f"{scheme.type} {scheme.strategy} {scheme.block_structure} {scheme.input_strategy}"
    _CPU_PRODUCTS[key] = (multiply, scheme)

    def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = _cpu_linear(x, weight, scale, bias, key)
        return result

    return name, product


_CPUProduct = Callable[[Tensor, Tensor, Tensor, QuantScheme], Tensor]
_CPU_PRODUCTS: dict[str, tuple[_CPUProduct, QuantScheme]] = {}


# One op for compilers.  If they look inside, torch's inductor splits the fused product into q, k
# and v before rotary embedding and reads past the end of each.
@torch.library.custom_op("flashrl::cpu_linear", mutates_args=())
def _cpu_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, key: str) -> Tensor:
    multiply, scheme = _CPU_PRODUCTS[key]
    y = multiply(x, weight, scale, scheme)
    return (y if bias is None else y + bias).to(x.dtype)


@_cpu_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, key: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _choose_cpu_product(scheme: QuantScheme) -> tuple[str, _CPUProduct]:
    if scheme.strategy == "block":
        return "float32 product of dequantized blocks", _dequantized
    if scheme.type == "float":
        return "torch._scaled_mm", _scaled_mm
    if torch.cpu._is_vnni_supported():
        return "torch._int_mm", _int_mm
    return "float32 product of integers", _float32_of_integers


def _int_mm(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    return torch._int_mm(values, weight.t()).float().mul_(input_scale).mul_(scale.t())


def _float32_of_integers(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    # Without VNNI torch._int_mm is a naive loop.  1024 products of two int8 values stay below
    # 2**24, so every partial sum is exact in float32.
    values, input_scale = quantize_activations(x, scheme)
    total = torch.zeros(len(values), len(weight), dtype=torch.int32)
    for start in range(0, weight.shape[1], 1024):
        part = slice(start, start + 1024)
        total += (values[:, part].float() @ weight[:, part].float().t()).to(torch.int32)
    return total.float().mul_(input_scale).mul_(scale.t())


def _scaled_mm(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    result: Tensor = torch._scaled_mm(
        values,
        weight.t(),
        scale_a=input_scale.expand(len(values), 1).contiguous(),
        scale_b=scale.t(),
        out_dtype=torch.float32,
    )
    return result


def _dequantized(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    assert scheme.block_structure is not None  # only block schemes come here
    spread = input_scale.repeat_interleave(scheme.block_structure[1], dim=1)
    inputs = values.float().mul_(spread[:, : values.shape[1]])
    return inputs @ dequantize(weight, scale, scheme=scheme).t()
