"""The names and shapes of a full set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.errors import ProfileError

__all__ = ["checkpoint_shapes"]


def checkpoint_shapes(model_config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of the model that an engine runs.

    They are read from the checkpoint's headers.  Where there is none (random weights, for a
    trainer that pushes its own), transformers' model says them, made without memory.

    Args:
        model_config: vLLM's ``ModelConfig``.
    """
    try:
        headers = Checkpoint.open(_local_folder(model_config.model)).headers
        return {name: header.shape for name, header in headers.items()}
    except ProfileError:
        return _shapes_of_transformers_model(model_config.hf_config)


def _local_folder(model: str) -> Path:
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ProfileError(f"{model} is not in the local cache") from error


def _shapes_of_transformers_model(config: Any) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
