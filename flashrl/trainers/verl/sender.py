"""Weights that leave verl's trainer in 8 bit, for an engine in another process.

verl sends them as the trainer holds them, most often in FP32.  Values and scales are a quarter of
that, and half of BF16, with the same bits in the engine: the trainer's process does the rounding
that the engine's would do.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from flashrl.core.config import Config, load_config
from flashrl.core.environment import EnvironmentOptions
from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.quantized import quantize_tensors
from flashrl.trainers.guards import warn_once

__all__ = ["quantized", "scheme_of_replica"]

logger = logging.getLogger(__name__)

_Update = Callable[..., Awaitable[Any]]


def scheme_of_replica(
    config: Config, replica_rank: int, *, ranks_per_replica: int = 1, tensor_parallel: int = 1
) -> QuantScheme | None:
    """What a replica's weights can be quantized to before they leave; None for 16 bit.

    Args:
        config: What FLASHRL_CONFIG says.
        replica_rank: Of the replica, from 0.
        ranks_per_replica: Its data-parallel ranks, which all get the same tensors.
        tensor_parallel: Its tensor-parallel ranks.  Where they cut the input axis each slice has
            scales of its own, which only the engine can compute.

    Example:
        >>> config = Config.from_yaml("configs: [{fn: int8}, {fn: bf16}]")
        >>> scheme_of_replica(config, 0).name, scheme_of_replica(config, 1)
        ('int8', None)
    """
    first = replica_rank * ranks_per_replica
    entries = {config.for_rank(first + i) for i in range(ranks_per_replica)}
    entry = next(iter(entries))
    scheme = entry.quant_scheme
    alike = len(entries) == 1 and entry.profile is None and scheme.dynamic
    if not (alike and scheme.quantized and tensor_parallel == 1):
        return None
    return scheme


def quantized(update_weights: _Update) -> _Update:
    """``update_weights`` of a client of verl's for an engine, with tensors in 8 bit if asked for.

    Adapters of LoRA and verl's deltas are none of our business and go as they are.
    """

    @functools.wraps(update_weights)
    async def with_quantized(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        config = load_config()
        is_delta = kwargs.get("wire_format", "named_tensors") != "named_tensors"
        if (
            config is not None
            and EnvironmentOptions.from_environ().quantized_sync
            and not (is_delta or kwargs.get("peft_config") or hasattr(weights, "__aiter__"))
        ):
            scheme = scheme_of_replica(
                config,
                self.replica_rank,
                ranks_per_replica=self.config.data_parallel_size,
                tensor_parallel=self.config.tensor_model_parallel_size,
            )
            if scheme is None:
                warn_once(
                    "16-bit sync",
                    f"weights for replica {self.replica_rank} are sent in 16 bit: its scheme, "
                    "profile or tensor parallelism leaves the scales to the engine",
                )
            else:
                weights = quantize_tensors(weights, scheme)
        return await update_weights(self, weights, *args, **kwargs)

    return with_quantized
