"""What TRL's GRPO batches hold, and how a metric gets into its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashrl.trainers.metrics import PREFIX

__all__ = ["log_metrics", "log_value", "loss_mask"]


def loss_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """1 where a token was sampled and may count, (batch, response_length)."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def log_value(trainer: Any, name: str, value: float) -> None:
    """Add a number to the trainer's next log, under ``flashrl/<name>``."""
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode][PREFIX + name].append(float(value))


def log_metrics(trainer: Any, metrics: Mapping[str, Any]) -> None:
    """Add a batch's metrics to the trainer's next log, of all its processes.

    Means are averaged over the processes, and of a maximum the largest is taken.

    Args:
        trainer: TRL's.
        metrics: ``flashrl/<name>`` → number.
    """
    values = torch.tensor(list(map(float, metrics.values())), device=trainer.accelerator.device)
    gathered = trainer.accelerator.gather(values).view(-1, len(metrics))
    for column, name in enumerate(metrics):
        each = gathered[:, column]
        value = each.max() if name.endswith("_max") else each.mean()
        log_value(trainer, name.removeprefix(PREFIX), float(value))
