"""Sizes read from a configuration, against models that transformers builds from the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.predict.shapes import MODELS, ModelShape
from flashrl.errors import ConfigError, UnsupportedError

QWEN7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "vocab_size": 1000,
}


def build(model_type: str, config: dict[str, Any]) -> transformers.PreTrainedModel:
    """The model, without memory."""
    settings = transformers.AutoConfig.for_model(
        model_type, **{key: value for key, value in config.items() if key != "model_type"}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    model.tie_weights()  # transformers before 5.1 ties later than it builds
    return model


@pytest.mark.parametrize("name", MODELS)
def test_qwen25_sizes_are_those_of_the_built_model(name: str) -> None:
    shape = MODELS[name]
    model = build(
        "qwen2",
        {
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "layer_types": ["full_attention"] * shape.num_layers,
        },
    )
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert shape.num_parameters == matrices


@pytest.mark.parametrize(
    ("name", "billions"),
    # Qwen2.5 technical report, arXiv:2412.15115, and the model cards.
    [
        ("qwen2.5-0.5b", 0.49),
        ("qwen2.5-1.5b", 1.54),
        ("qwen2.5-3b", 3.09),
        ("qwen2.5-7b", 7.61),
        ("qwen2.5-14b", 14.7),
        ("qwen2.5-32b", 32.5),
        ("qwen2.5-72b", 72.7),
    ],
)
def test_qwen25_sizes_are_those_published(name: str, billions: float) -> None:
    assert ModelShape.from_config(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 64}),
        ("qwen3", {"head_dim": 48}),
        ("gpt_neox", {"num_key_value_heads": 8, "tie_word_embeddings": False}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "qwen2_moe",
            {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 96,
                "shared_expert_intermediate_size": 160,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
            },
        ),
        (
            "qwen3_moe",
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "mlp_only_layers": [0],
                "head_dim": 32,
            },
        ),
    ],
)
def test_sizes_are_those_of_the_built_model(model_type: str, extra: dict[str, Any]) -> None:
    config = {**SMALL, "model_type": model_type, **extra}
    shape = ModelShape.from_config(config)
    model = build(model_type, config)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() >= 2}
    embeddings = ("embed", "lm_head", "gate.weight")  # the router, and Qwen's shared-expert gate
    unquantized = {n: size for n, size in matrices.items() if any(e in n for e in embeddings)}
    shared_gate = sum(size for name, size in matrices.items() if "shared_expert_gate" in name)
    assert shape.num_linear_parameters == sum(matrices.values()) - sum(unquantized.values())
    assert shape.num_unquantized_parameters == sum(unquantized.values()) - shared_gate


def test_reads_a_mapping_a_file_a_folder_and_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN7B))
    shapes = [
        ModelShape.from_config(source)
        for source in (
            QWEN7B,
            tmp_path,
            str(tmp_path / "config.json"),
            "Qwen/Qwen2.5-7B-Instruct",
            MODELS["qwen2.5-7b"],
        )
    ]
    assert {shape.num_parameters for shape in shapes} == {7_615_283_200}
    assert shapes[1].name == shapes[2].name == tmp_path.name


def test_language_model_inside_a_multimodal_one_is_found() -> None:
    nested = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, "text_config": QWEN7B}
    assert ModelShape.from_config(nested).num_parameters == 7_615_283_200


def test_missing_key_value_heads_mean_as_many_as_queries() -> None:
    assert ModelShape.from_config({**SMALL, "num_key_value_heads": None}).num_key_value_heads == 8


def test_every_fault_is_named_at_once() -> None:
    broken = {**SMALL, "hidden_size": None, "vocab_size": 0, "num_key_value_heads": 3}
    broken["intermediate_size"] = "wide"
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_config(broken)
    message = str(caught.value)
    for fault in (
        "hidden_size is missing",
        "vocab_size is 0",
        "intermediate_size is 'wide'",
        "num_attention_heads 8 is no multiple of num_key_value_heads 3",
    ):
        assert fault in message


def test_faults_of_experts_are_named_at_once() -> None:
    broken = {**SMALL, "num_experts": 4, "num_experts_per_tok": 5, "mlp_only_layers": "all"}
    with pytest.raises(ConfigError, match=r"5 is more than 4 experts; mlp_only_layers is 'all'"):
        ModelShape.from_config(broken)


@pytest.mark.parametrize("content", ["{", "[1]", None, b"\xff\xfe"])
def test_unreadable_configurations_say_what_is_allowed(tmp_path: Path, content: Any) -> None:
    if isinstance(content, bytes):
        (tmp_path / "config.json").write_bytes(content)
    elif content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json|JSON object"):
        ModelShape.from_config(tmp_path)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_attention_of_another_kind_is_refused(extra: dict[str, Any], kind: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        ModelShape.from_config({**SMALL, **extra})


def test_an_even_router_misses_experts_as_often_as_drawing_says() -> None:
    shape = ModelShape.from_config(
        {**SMALL, "num_local_experts": 16, "num_experts_per_tok": 2, "model_type": "mixtral"}
    )
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 12, 16, generator=generator).topk(2, dim=-1).indices
    visited = torch.zeros(4000, 16).scatter_(1, draws.flatten(1), 1.0).sum(dim=1).mean().item()
    expected = shape.num_dense_parameters + 4 * visited * 3 * 256 * 704
    assert shape.compute_touched_parameters(12) == pytest.approx(expected, rel=0.01)


@given(tokens=st.integers(1, 10_000))
def test_touched_weights_lie_between_one_tokens_and_all(tokens: int) -> None:
    shape = ModelShape.from_config({**SMALL, "num_experts": 8, "num_experts_per_tok": 2})
    touched = shape.compute_touched_parameters(tokens)
    assert shape.compute_active_parameters() <= touched * (1 + 1e-9)
    assert touched <= shape.num_linear_parameters
