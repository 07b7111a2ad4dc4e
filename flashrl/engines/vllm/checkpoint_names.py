"""What a full set of weights is: names, shapes, and whether it is in 8 bit already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.errors import ProfileError

__all__ = ["Contents", "local_folder", "read_contents"]

_8_BIT = ("I8", "F8_E4M3")


@attrs.frozen(kw_only=True)
class Contents:
    """What a checkpoint holds.

    Args:
        shapes: Shape of each tensor of a model in 16 bit, by name.
        quantized: Whether the checkpoint's linears are in 8 bit, each with a scale beside it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    quantized: bool = False


def read_contents(model_config: Any) -> Contents:
    """Look at the checkpoint of the model that an engine runs.

    Its headers are read.  Where there is none (random weights, for a trainer that pushes its own),
    transformers' model says the names, made without memory.

    Args:
        model_config: vLLM's ``ModelConfig``.
    """
    try:
        headers = Checkpoint.open(local_folder(model_config.model)).headers
    except ProfileError:
        return Contents(shapes=_shapes_of_transformers_model(model_config.hf_config))
    scales = {f"{name}_scale" for name, header in headers.items() if header.dtype in _8_BIT}
    return Contents(
        shapes={name: h.shape for name, h in headers.items() if name not in scales},
        quantized=not scales.isdisjoint(headers),
    )


def local_folder(model: str) -> Path:
    """The folder of a checkpoint: a path, or a name in the hub's local cache.

    Raises:
        ProfileError: It is neither.
    """
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
