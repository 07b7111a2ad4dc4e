"""Weights that leave OpenRLHF's trainer in 8 bit, for engines in other processes.

OpenRLHF broadcasts one parameter at a time, and insists on the engine's 16-bit dtype.  So 8-bit
values and their scales travel as the bytes of such a tensor, half as long as the weight, under a
name that says so; the engine's worker takes them apart again and loads both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashrl.core.config import load_config
from flashrl.core.environment import EnvironmentOptions
from flashrl.core.names import LayerRules, normalize
from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.quantized import SCALE_SUFFIX, quantize_tensors
from flashrl.trainers.guards import warn_once

__all__ = ["pack", "receiving", "sending", "unpack"]

_MARK = "flashrl-packed:"
_Method = Callable[..., Any]


def sending(broadcast_to_vllm: _Method) -> _Method:
    """``broadcast_to_vllm`` of the actor's trainer, with linears in 8 bit if asked for."""

    @functools.wraps(broadcast_to_vllm)
    def with_packing(self: Any) -> None:
        scheme = _scheme(self)
        if scheme is None:
            broadcast_to_vllm(self)
            return
        actor, self.actor = self.actor, _packing(self.actor, scheme)
        try:
            broadcast_to_vllm(self)
        finally:
            self.actor = actor

    return with_packing


def _scheme(trainer: Any) -> QuantScheme | None:
    """What linears are quantized to before they leave; None for 16 bit."""
    config = load_config()
    if config is None or not EnvironmentOptions.from_environ().quantized_sync:
        return None
    entry, args = config.entries[0], trainer.args
    scheme = entry.quant_scheme
    # Slices of the input axis have scales of their own; ZeRO-3 holds no whole weight; through
    # CUDA's IPC nothing travels.
    possible = (
        args.vllm.tensor_parallel_size == 1
        and args.ds.tensor_parallel_size == 1
        and args.ds.zero_stage != 3
        and not trainer.use_cuda_ipc
    )
    plain = scheme.dynamic and not scheme.prune_dead_neurons and entry.profile is None
    if possible and scheme.quantized and plain:
        return scheme
    warn_once(
        "16-bit sync",
        "weights are sent in 16 bit: the scheme, a profile, tensor parallelism, ZeRO-3 or "
        "colocation leaves the scales to the engine",
    )
    return None


class _Over:
    """An object with some attributes of its own, over another that has the rest."""

    def __init__(self, under: Any, **attributes: Any) -> None:
        self._under = under
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


def _packing(actor: Any, scheme: QuantScheme) -> Any:
    """An actor whose linears are packed when they are asked for."""
    rules = LayerRules.from_scheme(scheme)

    def named_parameters() -> Iterator[tuple[str, Any]]:
        for name, parameter in actor.model.module.named_parameters():
            is_linear = name.endswith(".weight") and parameter.ndim == 2
            if is_linear and rules.matches(normalize(name)):
                packed = _Packed(name, parameter, scheme)
                yield packed.name, packed
            else:
                yield name, parameter

    module = _Over(actor.model.module, named_parameters=named_parameters)
    return _Over(actor, model=_Over(actor.model, module=module))


class _Packed:
    """A parameter on its way: what OpenRLHF asks of one, computed when it sends it.

    Args:
        name: Its checkpoint name.
        parameter: The 16-bit weight, [out, in].
        scheme: What it is quantized to.
    """

    requires_grad = True

    def __init__(self, name: str, parameter: Tensor, scheme: QuantScheme) -> None:
        rows, columns = parameter.shape
        self.name = f"{_MARK}{rows}x{columns}:{name}"
        self.dtype = parameter.dtype
        self.shape = torch.Size([_num_bytes(scheme, rows, columns) // parameter.element_size()])
        self._weight = name, parameter, scheme

    @property
    def data(self) -> Tensor:
        name, parameter, scheme = self._weight
        return pack(name, parameter.data, scheme)


def _num_bytes(scheme: QuantScheme, rows: int, columns: int) -> int:
    """Bytes of values and scales, rounded up to a multiple of 4."""
    num_scales = math.prod(scheme.scale_shape((rows, columns)))
    return -(-rows * columns // 4) * 4 + 4 * num_scales


def pack(name: str, weight: Tensor, scheme: QuantScheme) -> Tensor:
    """Quantize a weight, and lay values and scales out as one tensor of its own dtype.

    Args:
        name: Its checkpoint name, for errors.
        weight: fp32, bf16 or fp16, [out, in].
        scheme: What it is quantized to.

    Returns:
        The bytes: values, padded to a multiple of 4, then float32 scales.  A weight with NaN or
        infinity becomes scales of NaN, for the engine to refuse it by name.
    """
    rows, columns = weight.shape
    packed = torch.zeros(_num_bytes(scheme, rows, columns), dtype=torch.uint8, device=weight.device)
    num_scale_bytes = 4 * math.prod(scheme.scale_shape(weight.shape))
    found = dict(quantize_tensors([(name, weight)], scheme))
    if name + SCALE_SUFFIX in found:
        packed[: rows * columns] = found[name].view(torch.uint8).flatten()
        packed[-num_scale_bytes:] = found[name + SCALE_SUFFIX].flatten().view(torch.uint8)
    else:
        packed[-num_scale_bytes:].view(torch.float32).fill_(math.nan)
    return packed.view(weight.dtype)


def unpack(name: str, packed: Tensor, scheme: QuantScheme) -> list[tuple[str, Tensor]]:
    """What a worker loads for a tensor that came.

    Args:
        name: As it came; marked if it is packed.
        packed: As it came.
        scheme: What the sender quantized to.

    Returns:
        The tensor as it is, or values and scales under compressed-tensors' names.
    """
    if not name.startswith(_MARK):
        return [(name, packed)]
    size, _, name = name.removeprefix(_MARK).partition(":")
    rows, columns = map(int, size.split("x"))
    shape = scheme.scale_shape((rows, columns))
    data = packed.view(torch.uint8)
    values = data[: rows * columns].view(scheme.dtype).view(rows, columns)
    scale = data[-4 * math.prod(shape) :].view(torch.float32).view(shape)
    return [(name, values), (name + SCALE_SUFFIX, scale)]


def receiving(update_weight: _Method) -> _Method:
    """``update_weight`` of OpenRLHF's part of vLLM's worker, which takes packed tensors too."""

    @functools.wraps(update_weight)
    def with_unpacking(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        config = load_config()
        if config is None or not name.startswith(_MARK):
            return update_weight(self, name, *args, **kwargs)
        return update_weight(
            _unpacking(self, config.entries[0].quant_scheme), name, *args, **kwargs
        )

    return with_unpacking


def _unpacking(worker: Any, scheme: QuantScheme) -> Any:
    """A worker whose model takes apart what it loads."""
    runner = worker.model_runner

    def load_weights(weights: Any) -> Any:
        named = [pair for name, tensor in weights for pair in unpack(name, tensor, scheme)]
        return runner.model.load_weights(named)

    model = _Over(runner.model, load_weights=load_weights)
    return _Over(worker, model_runner=_Over(runner, model=model))
