"""Activations in 8 bit: the scale is computed from what passes, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from flashrl.core.schemes import QuantScheme

__all__ = ["quantize_activations"]


def quantize_activations(activations: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Quantize activations as ``scheme.input_strategy`` says.

    The arithmetic is that of weights: float32, ``scale = amax / qmax``, 1 where all is zero,
    rounding to nearest even.

    Args:
        activations: fp32, bf16 or fp16, (tokens, in).
        scheme: What shares a scale, and the 8-bit type.

    Returns:
        The 8-bit values, (tokens, in), and the float32 scale that dequantizes them: (tokens, 1)
        for ``"token"``, (1, 1) for ``"tensor"``, (tokens, ceil(in / group)) for ``"group"``.

    Example:
        >>> from flashrl.core.schemes import get_scheme
        >>> values, scale = quantize_activations(torch.tensor([[1.0, -2.0]]), get_scheme("int8"))
        >>> values.tolist(), round(scale.item(), 5)
        ([[64, -127]], 0.01575)
    """
    values = activations.float()
    if scheme.input_strategy == "group":
        assert scheme.block_structure is not None  # QuantScheme guarantees it
        group = scheme.block_structure[1]
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % group))
        amax = padded.view(values.shape[0], -1, group).abs().amax(dim=2)
    elif scheme.input_strategy == "tensor":
        amax = values.abs().amax().reshape(1, 1)
    else:
        amax = values.abs().amax(dim=1, keepdim=True)
    scale = amax / scheme.qmax
    scale = torch.where(scale == 0, 1.0, scale)
    if scheme.input_strategy == "group":
        spread = scale.repeat_interleave(group, dim=1)[:, : values.shape[1]]
    else:
        spread = scale
    values = values / spread
    if scheme.type == "int":
        values.round_()
    return values.clamp_(-scheme.qmax, scheme.qmax).to(scheme.dtype), scale
