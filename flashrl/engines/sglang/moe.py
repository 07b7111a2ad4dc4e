"""A mixture of experts whose experts exist in 8 bit only."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import Tensor
from torch.nn import functional as F

from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang import compat, cuda
from flashrl.engines.sglang.linear import refuse_split_scale, register_scale
from flashrl.engines.sglang.products import choose_product
from flashrl.engines.sglang.storage import QuantizedParameter, QuantizedStorage
from flashrl.errors import UnsupportedError

__all__ = ["FlashRLMoEMethod"]

_ACTIVATIONS: dict[str, Any] = {"silu": F.silu, "gelu": F.gelu}


class FlashRLMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """How SGLang makes and runs 8-bit experts.

    Args:
        scheme: How weights and activations are quantized.
        name: The layer's name in the engine.
    """

    def __init__(self, scheme: QuantScheme, name: str) -> None:
        self.scheme = scheme
        self.name = name

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register gate and up as ``w13_weight``, down as ``w2_weight``, and their scales."""
        self.check(layer, with_bias=with_bias)
        size = intermediate_size_per_partition
        gate_up = self._allocate([size, size] * num_experts, hidden_size)
        down = self._allocate([hidden_size] * num_experts, size)
        loader = extra_weight_attrs.get("weight_loader")
        self.install(layer, num_experts, gate_up, down, loader)

    def check(self, layer: Any, *, with_bias: bool) -> None:
        """Whether the experts are of the kind that is computed here.

        Raises:
            UnsupportedError: They are not gated, have biases, are spread over ranks, or have an
                activation that is not known here.
        """
        refuse_split_scale(self.name, self.scheme, split=getattr(layer, "moe_tp_size", 1) > 1)
        config = layer.moe_runner_config
        faults = [
            fault
            for fault, found in (
                ("have biases", with_bias),
                ("are not gated", not getattr(config, "is_gated", True)),
                (f"use {config.activation!r}", config.activation not in _ACTIVATIONS),
                ("are spread over ranks", getattr(layer, "moe_ep_size", 1) > 1),
            )
            if found
        ]
        if faults:
            raise UnsupportedError(
                f"{self.name}: flashrl quantizes gated experts with {' or '.join(_ACTIVATIONS)}, "
                f"these {' and '.join(faults)}; add {self.name!r} to the scheme's ignore"
            )

    def _allocate(self, parts: list[int], columns: int) -> QuantizedStorage:
        return QuantizedStorage.allocate(self.name, self.scheme, parts, columns)

    def install(
        self,
        layer: Any,
        num_experts: int,
        gate_up: QuantizedStorage,
        down: QuantizedStorage,
        weight_loader: Any,
    ) -> None:
        """Put the storages' parameters on a layer, one expert a leading index."""
        for name, storage in (("w13_weight", gate_up), ("w2_weight", down)):
            rows, columns = storage.weight.shape
            weight = QuantizedParameter(storage, (num_experts, rows // num_experts, columns))
            weight.weight_loader = weight_loader  # type: ignore[attr-defined]
            layer.register_parameter(name, weight)
            blocks = storage.scale.shape[0] // num_experts
            scale = storage.scale.view(num_experts, blocks, storage.scale.shape[1])
            register_scale(layer, f"{name}_scale", scale)
        self.gate_up, self.down = gate_up, down
        self.num_experts = num_experts
        self.product = choose_product(self.scheme, gate_up.weight)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Keep SGLang's configuration, and its fused kernel on CUDA."""
        self.moe_runner_config = moe_runner_config
        self.runner = None
        if self.gate_up.weight.is_cuda:
            self.runner = cuda.moe_runner(moe_runner_config)

    def get_triton_quant_info(self, layer: Any) -> Any:
        """How SGLang's fused kernel reads the experts."""
        return cuda.moe_quant_info(
            self.scheme,
            self.gate_up.weight.view(layer.w13_weight.shape),
            self.down.weight.view(layer.w2_weight.shape),
            layer.w13_weight_scale,
            layer.w2_weight_scale,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing is left to do, however often it is called."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Weighted sum of each token's experts."""
        if self.runner is not None:
            return self.runner.run(dispatch_output, self.get_triton_quant_info(layer))
        if self.moe_runner_config.apply_router_weight_on_input:
            raise UnsupportedError("router weights on the input are not supported on a CPU")
        weights, ids = dispatch_output.topk_output[:2]
        output = self._run_experts(dispatch_output.hidden_states, ids, weights)
        return compat.combine_input(output)

    def _run_experts(self, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Every chosen expert on its tokens, in float32 sums.

        Args:
            states: (tokens, hidden).
            ids: Chosen experts, (tokens, k); negative where another rank has the expert.
            weights: Their weights, (tokens, k).
        """
        result = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
        activate = _ACTIVATIONS[self.moe_runner_config.activation]
        for expert in sorted(e for e in set(ids.flatten().tolist()) if e >= 0):
            tokens, position = torch.where(ids == expert)
            gate, up = self._multiply(self.gate_up, expert, states[tokens]).chunk(2, dim=-1)
            output = self._multiply(self.down, expert, activate(gate) * up)
            result.index_add_(0, tokens, output.float() * weights[tokens, position, None])
        return result.to(states.dtype)

    def _multiply(self, storage: QuantizedStorage, expert: int, x: Tensor) -> Tensor:
        rows = storage.weight.shape[0] // self.num_experts
        where = slice(expert * rows, (expert + 1) * rows)
        return self.product.multiply(x, storage.weight[where], storage.scale_of(where), None)
