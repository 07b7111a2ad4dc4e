"""In the process that holds the weights: metrics of the sync."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from flashrl.trainers.metrics import PREFIX, scheme_metrics
from flashrl.trainers.openrlhf.options import schemes
from flashrl.trainers.openrlhf.rollouts import VERSION

__all__ = ["timed", "with_sync_metrics"]

_Method = Callable[..., Any]


def timed(broadcast_to_vllm: _Method) -> _Method:
    """``broadcast_to_vllm`` of the actor's trainer; notes its time, and counts."""

    @functools.wraps(broadcast_to_vllm)
    def with_time(self: Any) -> None:
        started = time.perf_counter()
        broadcast_to_vllm(self)
        self.flashrl_update_ms = 1000 * (time.perf_counter() - started)
        self.flashrl_num_syncs = getattr(self, "flashrl_num_syncs", 0) + 1

    return with_time


def with_sync_metrics(ppo_train: _Method) -> _Method:
    """``ppo_train`` of the actor's trainer; its status says how the batch's weights came about."""

    @functools.wraps(ppo_train)
    def with_metrics(self: Any, kl_ctl: float) -> dict[str, Any]:
        status: dict[str, Any] = ppo_train(self, kl_ctl)
        version = status.pop(VERSION, None)
        if version is not None:
            # Means over float32, of whole numbers; in step with the trainer it is 0 exactly.
            lag = getattr(self, "flashrl_num_syncs", 0) - version
            status[f"{PREFIX}version_lag"] = round(lag, 4)
        if hasattr(self, "flashrl_update_ms"):
            status[f"{PREFIX}update_ms"] = self.flashrl_update_ms
        return status | scheme_metrics(schemes())

    return with_metrics
