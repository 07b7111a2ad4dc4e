"""Mixtures of experts that exist in 8 bit only, and whose weights load 16-bit shards in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.loading import load_shard
from flashrl.engines.vllm.products import choose_product
from flashrl.engines.vllm.storage import QuantizedStorage
from flashrl.errors import SchemeError, ShapeError, UnsupportedError

__all__ = ["FlashRLMoEMethod"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


class FlashRLMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """How vLLM makes and runs the experts of a layer in 8 bit.

    The matrices of all experts lie under each other in one storage: gate above up (w13), and down
    (w2).

    Args:
        layer: The experts.
        scheme: How weights and activations are quantized.
        name: The layer's name in the engine.

    Raises:
        SchemeError: The scheme is by blocks, which experts do not run in.
    """

    def __init__(self, layer: Any, scheme: QuantScheme, name: str) -> None:
        super().__init__(layer.moe_config)
        if scheme.strategy == "block":
            raise SchemeError(
                f"{name}: experts run with one scale a channel or tensor, not in blocks; use "
                "fp8_channel, or add the layer to the scheme's ignore"
            )
        self.scheme = scheme
        self.name = name
        self._select_experts = compat.cpu_select_experts()
        # vLLM's reload keeps parameters as values of a dict whose weak keys are layers, so a
        # parameter that held its layer would keep both alive.
        self._layer = weakref.ref(layer)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_weight``, ``w2_weight`` and their scales on a layer."""
        self._intermediate = intermediate_size_per_partition
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        storages = []
        for key, shape in shapes.items():
            storage = QuantizedStorage.allocate(
                f"{self.name}.{key.removesuffix('_weight')}",
                self.scheme,
                (shape[0] * shape[1], shape[2]),
            )
            parameter: Any = nn.Parameter(storage.weight.view(shape), requires_grad=False)
            parameter.quantized_storage = storage  # a tensor's own storage() stays
            parameter.weight_loader = self.load
            layer.register_parameter(key, parameter)
            setattr(layer, f"{key}_scale", storage.scale.view(*shape[:2], 1))
            storages.append(storage)
        self.storages = tuple(storages)

    def load(
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Take one expert's gate (w1), up (w3) or down (w2), or all experts' at once.

        Args:
            param: ``w13_weight`` or ``w2_weight``.
            loaded_weight: [out, in] of the whole expert, or [experts, out, in].
            weight_name: Its name in the checkpoint.
            shard_id: ``"w1"``, ``"w2"`` or ``"w3"``.
            expert_id: Which expert of all.
            return_success: Whether vLLM wants to know if the expert is this rank's.
        """
        if loaded_weight.ndim == 3:
            results = [
                self.load(param, expert, weight_name, shard_id, index, return_success)
                for index, expert in enumerate(loaded_weight)
            ]
            return any(results) if return_success else None
        layer: Any = self._layer()
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local == -1:
            return False if return_success else None
        storage: QuantizedStorage = param.quantized_storage
        rank, ranks, size = self.moe.tp_rank, self.moe.tp_size, self._intermediate
        axis = 1 if shard_id == "w2" else 0
        rows = layer.hidden_size if axis else 2 * size
        expected = [layer.hidden_size, layer.hidden_size]
        expected[axis] = size * ranks
        if list(loaded_weight.shape) != expected:
            raise ShapeError(
                f"{weight_name} of {self.name}, expert {expert_id}: expected shape "
                f"{tuple(expected)}, got {tuple(loaded_weight.shape)}; nothing was written"
            )
        row = local * rows + (size if shard_id == "w3" else 0)
        load_shard(param, storage, loaded_weight.narrow(axis, rank * size, size), row=row)
        return True if return_success else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make sure that the layer's parameters are the storages, and choose the kernel."""
        for key, storage in zip(("w13_weight", "w2_weight"), self.storages, strict=True):
            storage.check_complete()
            parameter = getattr(layer, key)
            parameter.data = storage.weight.view(parameter.shape)
        self._choose_kernel(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: the kernel is called here, not through vLLM's choice of kernels."""
        return

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Weighted sum of each token's experts, (tokens, hidden)."""
        result: Tensor = self._experts(x, topk_weights, topk_ids)
        return result

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM leaves the routing to :meth:`apply_monolithic`."""
        return self._select_experts is not None

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Route tokens, then :meth:`apply`."""
        assert self._select_experts is not None  # is_monolithic was asked
        topk_weights, topk_ids = self._select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return self.apply(layer, x, topk_weights, topk_ids)

    def _choose_kernel(self, layer: Any) -> None:
        weight = self.storages[0].weight
        if weight.is_cuda:
            self.kernel_name = "fused_experts"
            self._experts = compat.cuda_experts(self.scheme, layer)
            return
        activation = getattr(layer.activation, "value", layer.activation)
        if activation not in _ACTIVATIONS:
            raise UnsupportedError(
                f"{self.name}: experts with activation {activation!r} do not run in 8 bit on a "
                f"CPU; known: {', '.join(_ACTIVATIONS)}. Add the layer to the scheme's ignore"
            )
        self._activation = _ACTIVATIONS[activation]
        self.kernel_name, self._product = choose_product(self.scheme, weight)
        self._experts = self._one_expert_after_another

    def _one_expert_after_another(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        layer: Any = self._layer()
        result = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(layer.global_num_experts):
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            tokens, position = torch.where(topk_ids == expert)
            if local == -1 or len(tokens) == 0:
                continue
            weight = topk_weights[tokens, position, None].float()
            states = x[tokens]
            if layer.apply_router_weight_on_input:
                states, weight = (states * weight).to(x.dtype), torch.ones_like(weight)
            both = self._product(
                states, layer.w13_weight[local], layer.w13_weight_scale[local], None
            )
            gate, up = both.chunk(2, dim=-1)
            gated = self._activation(gate) * up
            down = self._product(gated, layer.w2_weight[local], layer.w2_weight_scale[local], None)
            result.index_add_(0, tokens, down.float() * weight)
        return result.to(x.dtype)
