"""A profile, and what it does to weights, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from flashrl.core.profiles import Profile
from flashrl.testing import Checkpoint

GROUPS = {
    f"model.layers.{layer}.{source}.weight": [
        f"model.layers.{layer}.{reader}.weight" for reader in readers
    ]
    for layer in range(2)
    for source, readers in (
        ("input_layernorm", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ("self_attn.v_proj", ["self_attn.o_proj"]),
        ("mlp.up_proj", ["mlp.down_proj"]),
    )
}
SOURCE = {reader: source for source, readers in GROUPS.items() for reader in readers}


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.named_tensors()}


def make_profile(checkpoint: Checkpoint) -> Profile:
    """Factors for every group of a model with two layers, and scales that clip a little."""
    held = weights(checkpoint)
    factors = {source: torch.rand(held[source].shape[0]) * 2 + 0.25 for source in GROUPS}
    return Profile(
        scheme="int8",
        smoothing=factors,
        groups=GROUPS,
        scales={name: held[name].float().abs().amax(1, keepdim=True) / 100 for name in SOURCE},
    )


def smooth(name: str, tensor: Tensor, profile: Profile) -> Tensor:
    values = tensor.float()
    rows = profile.smoothing.get(name.replace(".bias", ".weight"))
    if rows is not None:
        values = values / (rows if values.ndim == 1 else rows[:, None])
    return values * profile.smoothing[SOURCE[name]] if name in SOURCE else values
