"""The 8-bit layers: parameters that exist only as the product reads them, and load 16 bit."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from flashrl.core.quantize import quantize_into
from flashrl.core.quantize.products import choose_product
from flashrl.core.schemes import QuantScheme

__all__ = ["QuantizedExperts", "QuantizedLinear", "is_stacked_experts"]


class QuantizedLinear(nn.Module):
    """``y = x Wᵀ + b`` with W and x in 8 bit.

    Args:
        out_features: Rows of W.
        in_features: Columns of W.
        scheme: How W and x are quantized.
        bias: The linear's own bias parameter, kept as it is.
        device: Where the 8-bit weight lives.

    Attributes:
        weight: 8-bit values, [out, in].
        weight_scale: float32, shaped as the scheme says.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        out_features: int,
        in_features: int,
        scheme: QuantScheme,
        *,
        bias: nn.Parameter | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.scheme = scheme
        self.weight = _empty((out_features, in_features), scheme.dtype, device)
        self.weight_scale = _empty(
            scheme.scale_shape((out_features, in_features)), torch.float32, device
        )
        self.register_parameter("bias", bias)
        self.product = choose_product(scheme, self.weight)

    def load(self, weight: Tensor, *, smoothing: Tensor | None = None, name: str = "") -> None:
        """Quantize a 16-bit weight [out, in] into place; see :func:`quantize_into`."""
        quantize_into(
            weight,
            self.weight.data,
            self.weight_scale.data,
            scheme=self.scheme,
            smoothing=smoothing,
            name=name,
        )

    def take(self, values: Tensor, scale: Tensor) -> None:
        """Take a weight that is quantized already: 8-bit values, and a scale of the scheme's."""
        self.weight.data.copy_(values)
        self.weight_scale.data.copy_(scale)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., in) to (..., out), in the dtype of ``x``."""
        flat = x.reshape(-1, self.in_features)
        y = self.product.multiply(flat, self.weight, self.weight_scale, self.scheme)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and scheme, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, scheme={self.scheme.name}"


def is_stacked_experts(module: nn.Module) -> bool:
    """Whether a module holds all its experts in ``gate_up_proj`` and ``down_proj``.

    That is how transformers 5 keeps a gated mixture of experts: [experts, 2 · intermediate,
    hidden] and [experts, hidden, intermediate].
    """
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    return (
        isinstance(gate_up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and gate_up.ndim == down.ndim == 3
        and gate_up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])
        and hasattr(module, "act_fn")
        and not hasattr(module, "gate_up_proj_bias")
    )


class QuantizedExperts(nn.Module):
    """A gated mixture of experts whose linears are 8-bit; expert e is child ``e``.

    So ``3.gate_proj.weight`` is the name of a weight here as it is in the checkpoint.

    Args:
        experts: The 16-bit module, see :func:`is_stacked_experts`.
        scheme: How weights and activations are quantized.
    """

    def __init__(self, experts: nn.Module, scheme: QuantScheme) -> None:
        super().__init__()
        down = experts.down_proj
        assert isinstance(down, nn.Parameter)  # is_stacked_experts was asked
        self.num_experts, hidden, intermediate = down.shape
        self.act_fn = cast(nn.Module, experts.act_fn)
        for index in range(self.num_experts):
            expert = nn.Module()
            expert.gate_proj = QuantizedLinear(intermediate, hidden, scheme, device=down.device)
            expert.up_proj = QuantizedLinear(intermediate, hidden, scheme, device=down.device)
            expert.down_proj = QuantizedLinear(hidden, intermediate, scheme, device=down.device)
            self.add_module(str(index), expert)

    def linears(self, projection: str) -> list[QuantizedLinear]:
        """Every expert's ``"gate_proj"``, ``"up_proj"`` or ``"down_proj"``."""
        return [
            cast(QuantizedLinear, self.get_submodule(f"{index}.{projection}"))
            for index in range(self.num_experts)
        ]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: Chosen experts, (tokens, k).
            top_k_weights: Their weights, (tokens, k).

        Returns:
            (tokens, hidden).
        """
        gates, ups, downs = map(self.linears, ("gate_proj", "up_proj", "down_proj"))
        result = torch.zeros_like(hidden_states)
        for index in sorted(set(top_k_index.flatten().tolist())):
            tokens, position = torch.where(top_k_index == index)
            states = hidden_states[tokens]
            gated = self.act_fn(gates[index](states)) * ups[index](states)
            output = downs[index](gated) * top_k_weights[tokens, position, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
