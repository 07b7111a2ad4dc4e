"""Smoothing must not change a model: checked on real transformers models of many families."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flashrl.core.profiles import Profile
from flashrl.core.profiles.smoothing import (
    Smoothing,
    collect_activation_amax,
    compute_smoothing,
    find_groups,
    norm_offset,
)
from flashrl.errors import NonFiniteError, ShapeError

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type: str, **changes: object) -> nn.Module:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 13).view(1, 12)).logits


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("model_type", "changes", "sources_per_layer"),
    [
        ("llama", {}, 3),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}, 4),
        ("qwen2", {"num_key_value_heads": 4}, 4),
        ("qwen3", {}, 3),
        ("gemma2", {}, 3),
        ("gemma3_text", {"query_pre_attn_scalar": 4}, 3),
        ("phi3", {}, 2),
        ("cohere", {}, 2),
        ("olmo2", {}, 1),
        ("glm4", {"partial_rotary_factor": 0.5}, 2),
        ("qwen2_moe", {"decoder_sparse_step": 1}, 3),
        ("mixtral", {}, 2),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, 1),
        (
            "deepseek_v3",
            {"n_routed_experts": 4, "first_k_dense_replace": 0, "kv_lora_rank": 8, "n_group": 2}
            | {"q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
            | {"topk_group": 1, "num_key_value_heads": 4, "n_shared_experts": 1},
            3,
        ),
        (
            "qwen3_next",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
            | {"linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
            None,
        ),
    ],
)
def test_smoothing_does_not_change_the_model(model_type, changes, sources_per_layer) -> None:
    """Every group this package finds, smoothed by random factors, leaves the logits alone."""
    model = build(model_type, **changes)
    expected = logits(model)
    groups = find_groups(shapes(model))
    if sources_per_layer is not None:
        assert len(groups) == sources_per_layer * SMALL["num_hidden_layers"]
    assert groups
    smoothing = {
        source: torch.empty(shapes(model)[source][0]).uniform_(0.25, 4.0) for source in groups
    }
    profile = Profile(
        scheme="int8",
        smoothing=smoothing,
        groups=groups,
        norm_offset=norm_offset(model.config.to_dict()),
    )
    profile.check(shapes(model))
    changed = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            smoothed = profile.smooth(name, parameter)
            changed += not torch.equal(smoothed, parameter)
            parameter.copy_(smoothed)
    assert changed >= len(groups) + sum(map(len, groups.values())) - len(
        set(groups) & {reader for readers in groups.values() for reader in readers}
    )
    assert torch.allclose(logits(model), expected, rtol=1e-3, atol=2e-5)


class TestFindGroups:
    NORM = "model.layers.0.input_layernorm.weight"
    Q = "model.layers.0.self_attn.q_proj.weight"

    def test_an_unknown_reader_leaves_the_norm_alone(self, caplog) -> None:
        """A weight that was left out would change the model."""
        with caplog.at_level(logging.WARNING, logger="flashrl"):
            groups = find_groups(
                {self.NORM: (8,), self.Q: (8, 8), "model.layers.0.mamba.in_proj.weight": (8, 8)}
            )
        assert groups == {}
        assert "mamba.in_proj" in caplog.text

    def test_an_unknown_reader_in_another_block_does_not_matter(self) -> None:
        layer = "model.layers.0."
        groups = find_groups(
            {
                self.NORM: (8,),
                self.Q: (8, 8),
                layer + "post_attention_layernorm.weight": (8,),
                layer + "mlp.up_proj.weight": (4, 8),
                layer + "mlp.mystery.weight": (4, 8),
            }
        )
        assert groups == {self.NORM: (self.Q,)}

    def test_shapes_that_do_not_fit_leave_the_norm_alone(self) -> None:
        assert find_groups({self.NORM: (8,), self.Q: (8, 4)}) == {}

    def test_names_on_disk_are_found_as_well(self) -> None:
        """Mixtral's experts, under the names of its checkpoint."""
        layer = "model.layers.0."
        moe = layer + "block_sparse_moe."
        up, down = moe + "experts.0.w3.weight", moe + "experts.0.w2.weight"
        assert find_groups(
            {
                layer + "input_layernorm.weight": (8,),
                layer + "post_attention_layernorm.weight": (8,),
                moe + "gate.weight": (1, 8),
                moe + "experts.0.w1.weight": (4, 8),
                up: (4, 8),
                down: (8, 4),
            }
        ) == {
            layer + "post_attention_layernorm.weight": (
                moe + "gate.weight",
                moe + "experts.0.w1.weight",
                up,
            ),
            up: (down,),
        }


class TestComputeSmoothing:
    @given(
        st.lists(
            st.tuples(st.floats(0, 1e4, width=32), st.floats(0, 1e4, width=32)),
            min_size=1,
            max_size=8,
        ),
        st.floats(0, 1),
    )
    def test_it_is_the_papers_formula_and_always_usable(self, pairs, alpha) -> None:
        """Equation 4 of arXiv 2211.10438; 1 where it divides by zero."""
        activations, weights = (torch.tensor(column) for column in zip(*pairs, strict=True))
        factor = compute_smoothing(activations, weights, alpha=alpha)
        assert bool((torch.isfinite(factor) & (factor > 0)).all())
        for got, x, w in zip(factor.tolist(), activations.tolist(), weights.tolist(), strict=True):
            if x > 1e-20 and w > 1e-20:
                assert got == pytest.approx(x**alpha / w ** (1 - alpha), rel=1e-4)
            elif x == 0 or w == 0:
                assert got == 1.0

    def test_bad_input_is_an_error(self) -> None:
        with pytest.raises(ShapeError, match=r"\(2,\)"):
            compute_smoothing(torch.ones(2), torch.ones(3), alpha=0.5)
        with pytest.raises(ValueError, match="alpha"):
            compute_smoothing(torch.ones(2), torch.ones(2), alpha=1.5)
        with pytest.raises(NonFiniteError):
            compute_smoothing(torch.tensor([float("nan")]), torch.ones(1), alpha=0.5)


class TestCollectActivationAmax:
    def test_it_sees_every_linear_layer_and_norm(self) -> None:
        model = build("llama")
        seen = {}

        def spy(name):
            return lambda _, args, out: seen.__setitem__(name, (args[0], out))

        norm, down = "model.layers.1.input_layernorm", "model.layers.1.mlp.down_proj"
        for name in (norm, down):
            model.get_submodule(name).register_forward_hook(spy(name))
        with collect_activation_amax(model) as amax:
            logits(model)
        assert amax[f"{norm}.weight"].equal(seen[norm][1].abs().flatten(0, 1).amax(0))
        assert amax[f"{down}.weight"].equal(seen[down][0].abs().flatten(0, 1).amax(0))
        assert set(amax) >= {name for name in shapes(model) if "layers" in name}

    def test_it_keeps_the_largest_and_stops_at_the_end(self) -> None:
        layer = nn.Linear(2, 1)
        with collect_activation_amax(layer) as amax:
            layer(torch.tensor([[1.0, -4.0]]))
            layer(torch.tensor([[-2.0, 3.0]]))
            layer(torch.empty(0, 2))
        layer(torch.full((1, 2), 9.0))
        assert amax[".weight"].tolist() == [2.0, 4.0]


def test_smoothing_keeps_dtype_unless_told() -> None:
    smoothing = Smoothing(columns=torch.tensor([3.0, 1.0]), rows=torch.tensor([2.0]))
    weight = torch.ones(1, 2, dtype=torch.bfloat16)
    assert smoothing.apply(weight).dtype == torch.bfloat16
    assert smoothing.apply(weight, dtype=torch.float32).tolist() == [[1.5, 0.5]]
    assert weight.tolist() == [[1.0, 1.0]]
