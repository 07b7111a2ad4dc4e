"""The kernels that multiply: vLLM's own on CUDA, the core's on a CPU.

None keeps anything derived from the weight: what was quantized last is what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashrl.core.quantize import products
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.errors import UnsupportedError

__all__ = ["Product", "choose_product"]

Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(activations (tokens, in), weight [out, in], scale, bias or None) → (tokens, out)."""


def choose_product(scheme: QuantScheme, weight: Tensor) -> tuple[str, Product]:
    """The product for a weight where it lives, and what ``describe()`` calls it.

    Args:
        scheme: How weights and activations are quantized.
        weight: The 8-bit weight, [out, in].

    Raises:
        UnsupportedError: vLLM has no kernel for it there.
    """
    device = weight.device
    if device.type == "cuda":
        return compat.cuda_product(scheme)
    if device.type != "cpu":
        raise UnsupportedError(
            f"flashrl runs vLLM on CUDA and CPU, not on {device.type}; use a 16-bit engine there"
        )
    chosen = products.choose_product(scheme, weight)
    key = f"{scheme.type} {scheme.strategy} {scheme.block_structure} {scheme.input_strategy}"
    _CPU_PRODUCTS[key] = (chosen, scheme)

    def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _cpu_linear(x, weight, scale, bias, key)
        return y

    return chosen.name, product


_CPU_PRODUCTS: dict[str, tuple[products.Product, QuantScheme]] = {}


# One op for compilers.  If they look inside, torch's inductor splits the fused product into q, k
# and v before rotary embedding and reads past the end of each.
@torch.library.custom_op("flashrl::cpu_linear", mutates_args=())
def _cpu_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, key: str) -> Tensor:
    product, scheme = _CPU_PRODUCTS[key]
    y = product.multiply(x, weight, scale, scheme)
    return (y if bias is None else y + bias).to(x.dtype)


@_cpu_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, key: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
