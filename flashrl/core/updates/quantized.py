"""Weights quantized before they travel: half the bytes of BF16, and the same bits in the engine.

The names are compressed-tensors': ``X.weight`` in 8 bit, and ``X.weight_scale`` in float32, one a
row, a tensor or a block, as the scheme says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashrl.core.interfaces import NamedTensors
from flashrl.core.names import LayerRules, normalize
from flashrl.core.quantize import quantize_into
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.errors import NonFiniteError

__all__ = ["SCALE_SUFFIX", "quantize_tensors"]

SCALE_SUFFIX = "_scale"
"""What a weight's name has behind it, for its scale."""


def quantize_tensors(
    named_tensors: NamedTensors, scheme: str | QuantScheme
) -> Iterator[tuple[str, Tensor]]:
    """Quantize what the engine would quantize, one tensor at a time.

    Whole tensors only: where an engine slices the input axis over ranks, each slice has scales of
    its own, and these weights must travel in 16 bit.

    Args:
        named_tensors: Checkpoint names and whole 16- or 32-bit tensors, on any device.
        scheme: The engine's.

    Yields:
        For a linear weight its 8-bit values and then its scale, both new tensors.  Every other
        tensor as it came, and so are all of them under a scheme with a profile's static scales.  A
        weight with NaN or infinity comes as it is too, for the engine to refuse it by name.

    Raises:
        UnknownNameError: No scheme has that name.

    Example:
        >>> weight, norm = torch.tensor([[1.0, -127.0]]), torch.ones(2)
        >>> tensors = {"mlp.up_proj.weight": weight, "norm.weight": norm}
        >>> for name, tensor in quantize_tensors(tensors.items(), "int8"):
        ...     print(name, tensor.dtype, tensor.tolist())
        mlp.up_proj.weight torch.int8 [[1, -127]]
        mlp.up_proj.weight_scale torch.float32 [[1.0]]
        norm.weight torch.float32 [1.0, 1.0]
    """
    scheme = get_scheme(scheme)
    rules = LayerRules.from_scheme(scheme)
    for name, tensor in named_tensors:
        is_linear = _is_matrix(name, tensor) and rules.matches(normalize(name))
        if not (scheme.dynamic and is_linear):
            yield name, tensor
            continue
        quantized = torch.empty(tensor.shape, dtype=scheme.dtype, device=tensor.device)
        scale = torch.empty(
            scheme.scale_shape(tensor.shape), dtype=torch.float32, device=tensor.device
        )
        try:
            quantize_into(tensor.detach(), quantized, scale, scheme=scheme, name=name)
        except NonFiniteError:
            yield name, tensor
            continue
        yield name, quantized
        yield name + SCALE_SUFFIX, scale


def _is_matrix(name: str, tensor: Tensor) -> bool:
    floating = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return name.endswith(".weight") and tensor.ndim == 2 and floating
