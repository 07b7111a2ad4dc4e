"""A model with experts, as a trainer holds it and as transformers writes it to disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture
def make_experts(tmp_path: Path) -> Callable[[str], tuple[Any, dict[str, Tensor]]]:
    """A tiny mixture of experts of a model type, and its checkpoint's tensors."""
    transformers = pytest.importorskip("transformers")

    def make(model_type: str) -> tuple[Any, dict[str, Tensor]]:
        config = transformers.AutoConfig.for_model(
            model_type,
            vocab_size=16,
            hidden_size=8,
            head_dim=4,
            intermediate_size=6,
            moe_intermediate_size=6,
            shared_expert_intermediate_size=6,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=3,
            num_local_experts=3,
            num_experts_per_tok=2,
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path)
        return model, load_file(tmp_path / "model.safetensors")

    return make
