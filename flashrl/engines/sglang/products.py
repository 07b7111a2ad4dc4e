"""The kernels that multiply: SGLang's own on CUDA, torch's on a CPU.

None keeps anything derived from the weight: what was quantized last is what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from flashrl.core.quantize import dequantize
from flashrl.core.quantize.activations import quantize_activations
from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang import cuda
from flashrl.errors import UnsupportedError

__all__ = ["Product", "choose_product"]

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(activations (tokens, in), weight [out, in], scale, bias or None) → (tokens, out)."""

# 1024 products of two int8 values sum to less than 2**24: float32 holds every partial sum exactly.
_EXACT_TERMS = 1024


@attrs.frozen
class Product:
    """A way to multiply.

    Args:
        name: What ``describe()`` calls it.
        multiply: The product itself.
    """

    name: str
    multiply: Multiply


def choose_product(scheme: QuantScheme, device: torch.device) -> Product:
    """The product for a scheme on a device.

    Raises:
        UnsupportedError: There is none for that device.
    """
    if device.type == "cuda":
        return Product(*cuda.product(scheme))
    if device.type != "cpu":
        raise UnsupportedError(
            f"flashrl runs SGLang on CUDA and CPU, not on {device.type}; use a 16-bit engine there"
        )
    if scheme.strategy == "block":
        name, product = "float32 product of dequantized blocks", _dequantized
    elif scheme.type == "float":
        name, product = "float32 product of fp8 values", _float32_of_fp8
    elif torch.cpu._is_vnni_supported():
        name, product = "torch._int_mm", _int_mm
    else:  # without VNNI torch._int_mm on a CPU is an order of magnitude slower than float32
        name, product = "float32 product of integers", _float32_of_integers

    def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y = product(x, weight, scale, scheme)
        return (y if bias is None else y + bias).to(x.dtype)

    return Product(name, multiply)


def _int_mm(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    return torch._int_mm(values, weight.t()).float().mul_(input_scale).mul_(scale.t())


def _float32_of_integers(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    total = torch.zeros(len(values), len(weight), dtype=torch.int32)
    for start in range(0, weight.shape[1], _EXACT_TERMS):
        part = slice(start, start + _EXACT_TERMS)
        total += (values[:, part].float() @ weight[:, part].float().t()).to(torch.int32)
    return total.float().mul_(input_scale).mul_(scale.t())


def _float32_of_fp8(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    return (values.float() @ weight.float().t()).mul_(input_scale).mul_(scale.t())


def _dequantized(x: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(x, scheme)
    assert scheme.block_structure is not None  # only block schemes come here
    spread = input_scale.repeat_interleave(scheme.block_structure[1], dim=1)
    inputs = values.float().mul_(spread[:, : values.shape[1]])
    return inputs @ dequantize(weight, scale, scheme=scheme).t()
