"""A SmoothQuant W8A8 copy of a checkpoint in compressed-tensors' format, made by hand.

Plain numpy-like arithmetic, apart from the code under test: norms divided, linears multiplied,
rows rounded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import torch
from safetensors.torch import load_file, save_file

from flashrl.core.profiles import Profile
from flashrl.core.profiles.calibration import profile_from_activations
from flashrl.core.profiles.smoothing import collect_activation_amax, find_groups
from flashrl.testing import Checkpoint

PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200, 4, 7, 7, 8]]


def calibrate(checkpoint: Checkpoint) -> Profile:
    """A profile of a tiny model, from what it does on three prompts.

    Norms are smoothed by that.  What feeds o_proj and down_proj is smoothed by arbitrary factors,
    as an llm-compressor recipe may ask.
    """
    model = checkpoint.model.float()
    with torch.no_grad(), collect_activation_amax(model) as amax:
        for ids in PROMPTS:
            model(torch.tensor([ids]))
    checkpoint.model.bfloat16()
    tensors = load_file(checkpoint.path / "model.safetensors")
    groups = find_groups({name: tensor.shape for name, tensor in tensors.items()})
    found = profile_from_activations(checkpoint.path, amax, scheme="int8", alpha=0.5)
    draw = torch.Generator().manual_seed(0)
    smoothing = {
        source: found.smoothing.get(
            source, torch.rand(len(tensors[source]), generator=draw) * 3 + 0.5
        )
        for source in groups
    }
    profile = attrs.evolve(found, smoothing=smoothing, groups=groups)
    scales = {
        name: quantize(smooth(name, tensor, profile))[1]
        for name, tensor in tensors.items()
        if is_linear(name)
    }
    return attrs.evolve(profile, scales=scales, weights=tuple(scales))


def smooth(name: str, tensor: torch.Tensor, profile: Profile) -> torch.Tensor:
    """A tensor, smoothed in float32: one factor of its source, one of its own."""
    values = tensor.float()
    own = profile.smoothing.get(name.replace(".bias", ".weight"))
    if own is not None:
        values = values / (own[:, None] if values.ndim == 2 else own)
    for source, readers in profile.groups.items():
        if name in readers:
            values = values * profile.smoothing[source]
    return values


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 values and a scale a row."""
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    scale[scale == 0] = 1.0
    return torch.round(values / scale).clamp(-127, 127).to(torch.int8), scale


def is_linear(name: str) -> bool:
    """Whether int8 quantizes a weight of the tiny dense models."""
    return name.endswith("_proj.weight")


def make_w8a8(base: Path, folder: Path, profile: Profile) -> Path:
    """Write the copy, as llm-compressor would."""
    shutil.copytree(base, folder)
    copy: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        smoothed = smooth(name, tensor, profile)
        if is_linear(name):
            copy[name], copy[f"{name}_scale"] = quantize(smoothed)
        else:
            copy[name] = smoothed.to(tensor.dtype)
    save_file(copy, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    args = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**args, "strategy": "channel", "dynamic": False},
                "input_activations": {**args, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
