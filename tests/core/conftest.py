"""Pairs of tiny checkpoints: what a trainer starts from, and a quantized copy of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

LAYER = "model.layers.0"
NORM = f"{LAYER}.input_layernorm.weight"
MLP_NORM = f"{LAYER}.post_attention_layernorm.weight"
Q, K, V, OUT = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo")
GATE, UP, DOWN = (f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
READERS = {NORM: (Q, K, V), MLP_NORM: (GATE, UP), UP: (DOWN,), V: (OUT,)}
LINEAR = (Q, K, V, OUT, GATE, UP, DOWN)
STRATEGY = {
    "int8": "channel",
    "fp8_channel": "channel",
    "fp8_tensor": "tensor",
    "fp8_block": "block",
}


@attrs.frozen(kw_only=True)
class Pair:
    """Folders of a BF16 checkpoint and its quantized copy, and what is in them."""

    base: Path
    quantized: Path
    weights: Mapping[str, torch.Tensor]
    scales: Mapping[str, torch.Tensor]


def compute_scale(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale as compressed-tensors stores it, and the same for every element, in float64."""
    qmax = 127.0 if scheme == "int8" else 448.0
    if STRATEGY[scheme] == "tensor":
        scale = (weight.abs().amax().view(1) / qmax).float()
        return scale, scale.double().expand_as(weight)
    if STRATEGY[scheme] == "channel":
        scale = (weight.abs().amax(1, keepdim=True) / qmax).float()
        return scale, scale.double().expand_as(weight)
    rows = [
        torch.stack([block.abs().amax() for block in strip.split(128, dim=1)])
        for strip in weight.split(128)
    ]
    scale = (torch.stack(rows) / qmax).float()
    every = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return scale, every[: weight.shape[0], : weight.shape[1]]


@pytest.fixture
def make_base(tmp_path: Path) -> Callable[..., Path]:
    """Write a one-layer Llama with transformers, in several shards."""
    transformers = pytest.importorskip("transformers")

    def make(
        *,
        num_key_value_heads: int = 2,
        intermediate_size: int = 96,
        edit: Mapping[str, torch.Tensor] = {},
    ) -> Path:
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=num_key_value_heads,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 2.0)
                if name in edit:
                    parameter.copy_(edit[name])
        model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
        return tmp_path / "base"

    return make


@pytest.fixture
def make_pair(make_base: Callable[..., Path], tmp_path: Path) -> Callable[..., Pair]:
    """Quantize a base by hand, in float64, into compressed-tensors' layout on disk."""

    def make(
        *,
        scheme: str = "int8",
        smoothing: Mapping[str, torch.Tensor] = {},
        **base_kwargs: object,
    ) -> Pair:
        base = make_base(**base_kwargs)
        weights = {}
        for shard in sorted(base.glob("*.safetensors")):
            weights |= load_file(shard)
        copy = {name: tensor.double() for name, tensor in weights.items()}
        for source, s in smoothing.items():
            copy[source] = copy[source] / s.double().view(-1, *[1] * (copy[source].ndim - 1))
            for reader in READERS[source]:
                copy[reader] = copy[reader] * s.double()
        tensors, scales, is_int = {}, {}, scheme == "int8"
        for name, tensor in copy.items():
            if name not in LINEAR:
                tensors[name] = tensor.to(torch.bfloat16)
                continue
            scales[name], per_element = compute_scale(tensor, scheme)
            q = tensor / per_element.clamp_min(1e-30)
            tensors[name] = q.round().to(torch.int8) if is_int else q.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scales[name]
        folder = tmp_path / "quantized"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if is_int else "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "int" if is_int else "float",
                        "strategy": STRATEGY[scheme],
                        "symmetric": True,
                        "dynamic": False,
                    },
                    "input_activations": {
                        "num_bits": 8,
                        "type": "int" if is_int else "float",
                        "strategy": "token",
                        "symmetric": True,
                        "dynamic": True,
                    },
                }
            },
            "quantization_status": "compressed",
        }
        (folder / "config.json").write_text(json.dumps(config))
        return Pair(base=base, quantized=folder, weights=weights, scales=scales)

    return make
