"""Random weights in the shapes of Qwen2.5, for benchmarks that need no download."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "tie_word_embeddings": False,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def compressed_tensors(kind: str) -> dict[str, Any]:
    """The ``quantization_config`` of a W8A8 checkpoint: channel weights, token activations.

    Args:
        kind: ``"int"`` or ``"float"``.
    """
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }


def write_config(folder: Path, size: str, *, quantized: str | None = None) -> Path:
    """Write a config.json that an engine can start from with dummy weights.

    Args:
        folder: Where to; made if need be.
        size: A key of :data:`SHAPES`.
        quantized: ``"int"`` or ``"float"`` for a checkpoint quantized by compressed-tensors.
    """
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
        "use_sliding_window": False,
        **SHAPES[size],
    }
    if quantized is not None:
        config["quantization_config"] = compressed_tensors(quantized)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_header(folder / "model.safetensors", size)
    return folder


def _write_header(path: Path, size: str) -> None:
    """Write a safetensors file with names and shapes whose data is a hole: it takes no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in random_weights(size, device="meta"):
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def random_weights(size: str, *, device: str, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors by name, bfloat16, normal with standard deviation 0.02."""
    shape = SHAPES[size]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    generator = None if device == "meta" else torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int, mean: float = 0.0) -> torch.Tensor:
        sample = torch.randn(sizes, device=device, dtype=torch.bfloat16, generator=generator)
        return sample.mul_(0.02).add_(mean)

    yield "model.embed_tokens.weight", normal(shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", normal(rows, hidden)
            yield f"{prefix}self_attn.{name}_proj.bias", normal(rows)
        yield f"{prefix}self_attn.o_proj.weight", normal(hidden, hidden)
        yield f"{prefix}mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", normal(inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", normal(hidden, inner)
        yield f"{prefix}input_layernorm.weight", normal(hidden, mean=1.0)
        yield f"{prefix}post_attention_layernorm.weight", normal(hidden, mean=1.0)
    yield "model.norm.weight", normal(hidden, mean=1.0)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", normal(shape["vocab_size"], hidden)
