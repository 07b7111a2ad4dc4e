"""How two 8-bit matrices are multiplied: the fastest exact way that the device has.

Every product takes activations (tokens, in) and a weight [out, in] and returns float32
(tokens, out).  Int8 products are exact in int32, whichever way is taken, so they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from flashrl.core.quantize.activations import quantize_activations
from flashrl.core.quantize.reference import dequantize
from flashrl.core.schemes import QuantScheme

__all__ = ["Product", "choose_product"]

# 1024 products of two int8 values sum to less than 2**24: float32 holds every partial sum exactly.
_EXACT_TERMS = 1024
# torch._int_mm on CUDA wants more rows than 16.
_MIN_CUDA_ROWS = 17


@attrs.frozen
class Product:
    """A way to multiply.

    Args:
        name: What ``describe()`` calls it.
        multiply: (activations, weight, weight scale, scheme) → float32 (tokens, out).
    """

    name: str
    multiply: Callable[[Tensor, Tensor, Tensor, QuantScheme], Tensor]


def choose_product(scheme: QuantScheme, weight: Tensor) -> Product:
    """The fastest exact product for a weight where it lives.

    Args:
        scheme: How weights and activations are quantized.
        weight: The 8-bit weight, [out, in].

    Returns:
        The product.
    """
    cuda = weight.is_cuda
    if scheme.strategy == "block":
        return Product("float32 product of dequantized blocks", _dequantized)
    if scheme.type == "int":
        if _fits(weight, 8) if cuda else _has_vnni():
            return Product("torch._int_mm", _int_mm)
        return Product("float32 product of integers", _float32_of_integers)
    if cuda and _fits(weight, 16) and torch.cuda.get_device_capability(weight.device) >= (8, 9):
        return Product("torch._scaled_mm", _scaled_mm)
    return Product("float32 product of fp8 values", _float32_of_fp8)


def _fits(weight: Tensor, multiple: int) -> bool:
    return all(size % multiple == 0 for size in weight.shape)


def _has_vnni() -> bool:
    # Without VNNI, torch._int_mm on a CPU is an order of magnitude slower than float32.
    supported = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return bool(supported())


def _int_mm(activations: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(activations, scheme)
    tokens = values.shape[0]
    if values.is_cuda and tokens < _MIN_CUDA_ROWS:
        values = torch.nn.functional.pad(values, (0, 0, 0, _MIN_CUDA_ROWS - tokens))
    product = torch._int_mm(values, weight.t())[:tokens]
    return product.float().mul_(input_scale).mul_(_as_row(scale))


def _float32_of_integers(
    activations: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme
) -> Tensor:
    values, input_scale = quantize_activations(activations, scheme)
    columns = weight.shape[1]
    product = torch.zeros(values.shape[0], weight.shape[0], dtype=torch.int32, device=values.device)
    for start in range(0, columns, _EXACT_TERMS):
        part = slice(start, start + _EXACT_TERMS)
        product += (values[:, part].float() @ weight[:, part].float().t()).to(torch.int32)
    return product.float().mul_(input_scale).mul_(_as_row(scale))


def _scaled_mm(activations: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(activations, scheme)
    product = torch._scaled_mm(
        values,
        weight.t(),
        scale_a=input_scale.expand(values.shape[0], 1).contiguous(),
        scale_b=_as_row(scale).expand(1, weight.shape[0]).contiguous(),
        out_dtype=torch.bfloat16,  # the only one it has with a scale per row
    )
    return product.float()


def _float32_of_fp8(
    activations: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme
) -> Tensor:
    values, input_scale = quantize_activations(activations, scheme)
    return (values.float() @ weight.float().t()).mul_(input_scale).mul_(_as_row(scale))


def _dequantized(activations: Tensor, weight: Tensor, scale: Tensor, scheme: QuantScheme) -> Tensor:
    values, input_scale = quantize_activations(activations, scheme)
    assert scheme.block_structure is not None  # only block schemes come here
    spread = input_scale.repeat_interleave(scheme.block_structure[1], dim=1)
    inputs = values.float().mul_(spread[:, : values.shape[1]])
    return inputs @ dequantize(weight, scale, scheme=scheme).t()


def _as_row(scale: Tensor) -> Tensor:
    return scale.reshape(1, -1)
