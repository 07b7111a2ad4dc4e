"""The kernels that multiply: SGLang's own on CUDA, the core's on a CPU.

None keeps anything derived from the weight: what was quantized last is what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from flashrl.core.quantize import products
from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang import cuda
from flashrl.errors import UnsupportedError

__all__ = ["Product", "choose_product"]


@attrs.frozen
class Product:
    """A way to multiply.

    Args:
        name: What ``describe()`` calls it.
        multiply: (activations (tokens, in), weight [out, in], scale, bias or None) →
            (tokens, out), in the dtype of the activations.
    """

    name: str
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def choose_product(scheme: QuantScheme, weight: Tensor) -> Product:
    """The product for a weight where it lives.

    Args:
        scheme: How weights and activations are quantized.
        weight: The 8-bit weight, [out, in].

    Raises:
        UnsupportedError: There is none for that device.
    """
    device = weight.device.type
    if device == "cuda":
        return Product(*cuda.product(scheme))
    if device != "cpu":
        raise UnsupportedError(
            f"flashrl runs SGLang on CUDA and CPU, not on {device}; use a 16-bit engine there"
        )
    chosen = products.choose_product(scheme, weight)

    def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y = chosen.multiply(x, weight, scale, scheme)
        return (y if bias is None else y + bias).to(x.dtype)

    return Product(chosen.name, multiply)
