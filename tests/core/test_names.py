"""Names against real wrappers, real multimodal models and compressed-tensors' own matching."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flashrl.core.names import FUSED, KEEP, LayerRules, NameIndex, canonical, fused_name, normalize
from flashrl.core.schemes import get_scheme
from flashrl.errors import SchemeError, UnknownNameError

LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(2, 2)


class TestNormalize:
    def test_torch_wrappers_leave_no_trace(self) -> None:
        model = nn.Sequential(Block(), Block())
        plain = [name for name, _ in model.named_parameters()]
        model[0] = checkpoint_wrapper(model[0])
        wrapped = torch.compile(model, backend="eager")
        names = [name for name, _ in wrapped.named_parameters()]
        assert any("_orig_mod" in name and "_checkpoint_wrapped_module" in name for name in names)
        assert [normalize(name) for name in names] == plain

    def test_ddp_leaves_no_trace(self, tmp_path) -> None:
        model = Block()
        plain = [name for name, _ in model.named_parameters()]
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
            names = [name for name, _ in wrapped.named_parameters()]
        finally:
            torch.distributed.destroy_process_group()
        assert names != plain
        assert [normalize(name) for name in names] == plain

    @pytest.mark.parametrize(
        ("wrapped", "plain"),
        [
            ("_fsdp_wrapped_module.lm_head.weight", "lm_head.weight"),
            (f"{LAYER}._fsdp_wrapped_module.mlp.up_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
            ("module.module._orig_mod.model.norm.weight", "model.norm.weight"),
            ("base_model.model.model.norm.weight", "model.norm.weight"),
            (
                f"base_model.model.{ATTENTION}.q_proj.base_layer.weight",
                f"{ATTENTION}.q_proj.weight",
            ),
            ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
            ("base_model.model.lm_head.modules_to_save.actor.weight", "lm_head.weight"),
            (
                f"base_model.model.{ATTENTION}.q_proj.lora_A.default.weight",
                f"{ATTENTION}.q_proj.lora_A.weight",
            ),
            (f"{ATTENTION}.q_proj.lora_B.weight", f"{ATTENTION}.q_proj.lora_B.weight"),
            ("pretrained_model.model.norm.weight", "model.norm.weight"),
            # A part of the model itself that is called like a wrapper, further in.
            ("model.module.weight", "model.module.weight"),
        ],
    )
    def test_each_wrapper(self, wrapped: str, plain: str) -> None:
        assert normalize(wrapped) == plain

    @given(st.data())
    def test_any_nesting_of_wrappers_gives_back_the_name(self, data: st.DataObject) -> None:
        plain = data.draw(
            st.sampled_from(
                ["lm_head.weight", "model.language_model.norm.weight", f"{ATTENTION}.q_proj.bias"]
            )
        )
        parts = plain.split(".")
        inner = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
        for _ in range(data.draw(st.integers(0, 4))):
            where = data.draw(st.integers(0, len(parts) - 1))
            parts.insert(where, data.draw(st.sampled_from(inner)))
        adapter = data.draw(st.sampled_from(["", "base_layer", "modules_to_save.default"]))
        parts[-1:] = [adapter, parts[-1]] if adapter else [parts[-1]]
        outer = data.draw(
            st.lists(st.sampled_from(["module", "base_model.model", *inner]), max_size=4)
        )
        wrapped = ".".join([*outer, *parts])
        assert normalize(wrapped) == plain
        assert normalize(plain) == plain
        assert canonical(canonical(wrapped)) == canonical(plain)


class TestCanonical:
    def test_the_language_half_of_a_multimodal_model_is_the_text_model(self) -> None:
        """What transformers 5 and vLLM call the same parameter compares equal."""
        transformers = pytest.importorskip("transformers")
        text = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        vision = {"embed_dim": 16, "hidden_size": 16, "num_heads": 2, "depth": 1, "mlp_ratio": 1}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
        with torch.device("meta"):
            whole = transformers.Qwen2VLForConditionalGeneration(config)
            half = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
        names = {canonical(name) for name, _ in whole.named_parameters()}
        towers = {name for name in names if name.startswith("visual.")}
        assert towers
        assert names - towers == {name for name, _ in half.named_parameters()}

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("language_model.model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("model.language_model.model.norm.weight", "model.norm.weight"),
            ("thinker.model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("thinker.lm_head.weight", "lm_head.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.language_model.lm_head", "lm_head"),
            ("model.text_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
            ("model.vision_tower.encoder.x", "vision_tower.encoder.x"),
            ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("lm_head.weight", "lm_head.weight"),
        ],
    )
    def test_each_prefix(self, name: str, expected: str) -> None:
        assert canonical(name) == expected


class TestNameIndex:
    KNOWN = ("model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight")

    def test_any_spelling_finds_the_known_one(self) -> None:
        index = NameIndex(self.KNOWN)
        for spelling in (
            self.KNOWN[0],
            "module." + self.KNOWN[0],
            "language_model.model.layers.0.mlp.up_proj.weight",
            "model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        ):
            assert index.resolve(spelling) == self.KNOWN[0]

    def test_an_exact_name_wins_over_one_that_only_compares_equal(self) -> None:
        both = ("model.visual.x", "visual.x")
        assert NameIndex(both).resolve_all(both) == list(both)

    def test_unknown_names_are_one_error_with_the_closest(self) -> None:
        with pytest.raises(UnknownNameError) as error:
            NameIndex(self.KNOWN).resolve_all(
                ["model.layers.0.mlp.up_porj.weight", "lm_head.weight", "zzz"]
            )
        message = str(error.value)
        assert "2 of 3" in message
        assert f"did you mean {self.KNOWN[0]}?" in message
        assert "zzz (nothing is close)" in message
        assert isinstance(error.value, LookupError)

    def test_a_long_list_of_unknown_names_is_cut(self) -> None:
        with pytest.raises(UnknownNameError, match="and 4 more"):
            NameIndex(["a"]).resolve_all([f"zz{i}" for i in range(12)])


class TestLayerRules:
    def test_ignored_shards_ignore_the_fused_layer(self) -> None:
        """vllm#11354: q, k and v all ignored, so the fused layer is."""
        ignore = [f"{ATTENTION}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        rules = LayerRules(ignore=ignore)
        assert not rules.matches(f"{ATTENTION}.qkv_proj", "QKVParallelLinear")
        assert rules.matches(f"{LAYER}.mlp.gate_up_proj")

    @pytest.mark.parametrize("ignore", [f"{ATTENTION}.q_proj", r"re:.*\.q_proj$"])
    def test_a_partly_ignored_fused_layer_is_an_error_that_names_it(self, ignore: str) -> None:
        """vllm#11354: only q ignored."""
        with pytest.raises(SchemeError) as error:
            LayerRules(ignore=[ignore]).matches(f"{ATTENTION}.qkv_proj")
        for name in ("qkv_proj", "k_proj", "v_proj", "q_proj"):
            assert f"{ATTENTION}.{name}" in str(error.value)

    def test_an_unfused_engine_may_ignore_q_alone(self) -> None:
        rules = LayerRules(ignore=[f"{ATTENTION}.q_proj"])
        assert not rules.matches(f"{ATTENTION}.q_proj")
        assert rules.matches(f"{ATTENTION}.k_proj")

    def test_explicit_targets_match_fused_names(self) -> None:
        """vllm#12617: a recipe lists the checkpoint's layers, the engine has fused ones."""
        targets = [f"{ATTENTION}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        rules = LayerRules(targets=targets)
        assert rules.matches(f"{ATTENTION}.qkv_proj", "QKVParallelLinear")
        assert rules.matches(f"{ATTENTION}.q_proj")
        assert not rules.matches("model.layers.1.self_attn.qkv_proj", "QKVParallelLinear")
        assert not rules.matches(f"{ATTENTION}.o_proj", "RowParallelLinear")
        with pytest.raises(SchemeError, match="qkv_proj"):
            LayerRules(targets=targets[:2]).matches(f"{ATTENTION}.qkv_proj")

    def test_a_fused_name_in_the_rules_covers_its_shards(self) -> None:
        rules = LayerRules(targets=[f"{LAYER}.mlp.gate_up_proj"])
        assert rules.matches(f"{LAYER}.mlp.up_proj")
        assert rules.matches(f"{LAYER}.mlp.gate_up_proj")
        assert not LayerRules(ignore=[rules.targets[0]]).matches(f"{LAYER}.mlp.gate_proj")

    def test_what_is_neither_targeted_nor_kept_is_settled_shard_by_shard(self) -> None:
        """A target that is ignored too does not split the layer."""
        rules = LayerRules(targets=[f"{ATTENTION}.q_proj"], ignore=[f"{ATTENTION}.q_proj"])
        assert not rules.matches(f"{ATTENTION}.qkv_proj")

    @pytest.mark.parametrize(
        "entry",
        [
            f"{ATTENTION}.q_proj.linear",
            r"re:.*self_attn\.q_proj\.linear$",
            r"re:.*\.layers\.0\..*\.linear",
        ],
    )
    def test_an_entry_ending_in_linear_still_matches(self, entry: str) -> None:
        """sglang#24927, sglang#28018: llm-compressor names the layer inside its wrapper."""
        rules = LayerRules(ignore=[entry])
        assert not rules.matches(f"{ATTENTION}.q_proj")
        assert not rules.matches(f"{ATTENTION}.q_proj.linear")
        assert rules.matches("model.layers.1.self_attn.o_proj")

    def test_fused_shards_are_found_through_the_linear_suffix(self) -> None:
        """sglang#28018: the wrapped names of all shards ignore the fused layer."""
        ignore = [f"{ATTENTION}.{part}.linear" for part in ("q_proj", "k_proj", "v_proj")]
        assert not LayerRules(ignore=ignore).matches(f"{ATTENTION}.qkv_proj")

    def test_a_regex_for_every_wrapped_layer_does_not_ignore_all_others(self) -> None:
        rules = LayerRules(ignore=[r"re:.*\.linear$"])
        assert rules.matches(f"{ATTENTION}.q_proj")
        assert not rules.matches(f"{ATTENTION}.q_proj.linear")

    @pytest.mark.parametrize(
        "name",
        [
            "visual.blocks.0.attn.qkv",
            "visual.blocks.0.attn.qkv_proj",
            "model.visual.merger.mlp.0",
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
            "model.vision_tower.encoder.layers.0.mlp.gate_proj",
            "vision_model.encoder.layers.0.mlp.fc1",
            "multi_modal_projector.linear_1",
            "model.multi_modal_projector.linear_1",
            "audio_tower.layers.0.fc1",
            "thinker.audio_tower.layers.0.fc1",
            "mm_projector.linear_1",
        ],
    )
    def test_nothing_under_a_vision_tower_is_quantized(self, name: str) -> None:
        """sglang#9596."""
        assert not LayerRules(ignore=()).matches(name)

    @pytest.mark.parametrize(
        "name",
        [
            "lm_head",
            "language_model.lm_head",
            "model.embed_tokens",
            "transformer.wte",
            "model.norm",
            f"{LAYER}.input_layernorm",
            f"{ATTENTION}.q_norm",
            f"{LAYER}.mlp.gate",
            f"{LAYER}.block_sparse_moe.gate",
            f"{LAYER}.mlp.router",
            f"{LAYER}.mlp.router.gate",
            f"{LAYER}.mlp.shared_expert_gate",
            f"{LAYER}.linear_attn.conv1d",
            f"{ATTENTION}.q_proj.bias",
            f"{LAYER}.mlp.experts.gate_up_proj_bias",
        ],
    )
    def test_what_stays_as_it_is_by_default(self, name: str) -> None:
        assert not LayerRules(ignore=()).matches(name)
        assert LayerRules(ignore=(), keep=()).matches(name)

    @pytest.mark.parametrize(
        "name",
        [
            f"{ATTENTION}.o_proj",
            f"{ATTENTION}.o_proj.weight",
            f"{LAYER}.mlp.gate_proj",
            f"{LAYER}.mlp.gate_up_proj",
            f"{LAYER}.mlp.shared_expert.gate_proj",
            f"{LAYER}.mlp.experts.3.gate_proj",
            f"{LAYER}.block_sparse_moe.experts.0.w1",
            f"{ATTENTION}.fused_qkv_a_proj",
            "model.language_model.layers.0.mlp.down_proj",
            "language_model.model.layers.0.mlp.down_proj",
        ],
    )
    def test_what_is_quantized_by_default(self, name: str) -> None:
        assert LayerRules().matches(name)

    @pytest.mark.parametrize(
        ("module_type", "expected"),
        [
            ("Linear", True),
            ("QKVParallelLinear", True),
            ("FusedMoE", True),
            ("Qwen2MoeExperts", True),
            ("Embedding", False),
            ("Conv1d", False),
            ("Linear8bitNormalizer", False),
        ],
    )
    def test_linear_means_every_linear_layer(self, module_type: str, expected: bool) -> None:
        assert LayerRules().matches(f"{LAYER}.mlp.experts", module_type) is expected

    def test_a_type_can_be_ignored(self) -> None:
        rules = LayerRules(ignore=["FusedMoE"])
        assert not rules.matches(f"{LAYER}.mlp.experts", "FusedMoE")
        assert rules.matches(f"{LAYER}.mlp.up_proj")

    def test_experts_are_judged_by_the_first(self) -> None:
        experts = f"{LAYER}.mlp.experts"
        parts = ("gate_proj", "up_proj", "down_proj")
        all_parts = [f"{experts}.{i}.{part}" for i in range(2) for part in parts]
        assert not LayerRules(ignore=all_parts).matches(experts, "FusedMoE")
        assert not LayerRules(ignore=[r"re:.*mlp\.experts$"]).matches(experts, "FusedMoE")
        with pytest.raises(SchemeError, match=r"down_proj"):
            LayerRules(ignore=[r"re:.*experts\.\d+\.down_proj"]).matches(experts, "FusedMoE")

    def test_a_prefix_ends_at_a_dot(self) -> None:
        rules = LayerRules(ignore=["model.layers.1"])
        assert not rules.matches("model.layers.1.mlp.up_proj")
        assert rules.matches("model.layers.10.mlp.up_proj")
        assert rules.matches("model.layers.0.mlp.up_proj")

    def test_an_entry_is_compared_across_multimodal_spellings(self) -> None:
        rules = LayerRules(ignore=["model.language_model.layers.0.mlp.up_proj"])
        assert not rules.matches("language_model.model.layers.0.mlp.up_proj")
        assert not rules.matches("module.model.layers.0.mlp.up_proj")

    def test_an_engine_may_bring_its_own_fused_layers(self) -> None:
        """Phi-3 is fused on disk: the layer is its own only part."""
        ignore = f"{ATTENTION}.qkv_proj"
        fused = {"qkv_proj": ["qkv_proj"]}
        assert not LayerRules(ignore=ignore, fused=fused).matches(ignore)
        assert LayerRules(ignore=f"{ATTENTION}.q_proj", fused=fused).matches(ignore)

    @pytest.mark.parametrize("field", ["targets", "ignore", "keep"])
    @pytest.mark.parametrize("entry", ["re:*broken", "re:(", "", "re:"])
    def test_a_bad_entry_is_an_error_that_shows_it(self, field: str, entry: str) -> None:
        with pytest.raises(SchemeError, match=field) as error:
            LayerRules(**{field: ["Linear", entry]})
        assert entry in ("", "re:") or repr(entry) in str(error.value)

    def test_a_scheme_brings_its_rules(self) -> None:
        scheme = get_scheme("int8").evolve(targets="re:.*up_proj", ignore="model.layers.1")
        rules = LayerRules.from_scheme(scheme)
        assert rules.targets == ("re:.*up_proj",)
        assert rules.matches("model.layers.0.mlp.up_proj")
        assert not rules.matches("model.layers.1.mlp.up_proj")
        assert not LayerRules.from_scheme(get_scheme("bf16")).matches("model.layers.0.mlp.up_proj")

    @pytest.mark.parametrize(
        "entry", [*KEEP, r"re:.*(q|k|v)_proj$", f"{ATTENTION}.q_proj", "Linear"]
    )
    @pytest.mark.parametrize(
        "name", [f"{ATTENTION}.q_proj", f"{ATTENTION}.o_proj", f"{LAYER}.mlp.gate", "lm_head"]
    )
    def test_an_entry_means_what_compressed_tensors_takes_it_for(
        self, entry: str, name: str
    ) -> None:
        match = pytest.importorskip("compressed_tensors.utils.match")
        expected = match.is_match(name, nn.Linear(1, 1), entry)
        assert LayerRules(targets=[entry], ignore=(), keep=()).matches(name) is expected


@pytest.mark.parametrize(("whole", "part"), [(w, p) for w, ps in FUSED.items() for p in ps])
def test_every_shard_knows_its_fused_layer(whole: str, part: str) -> None:
    if whole != "experts":
        assert fused_name(f"a.{part}") == f"a.{whole}"
        assert fused_name(part) == whole
    assert fused_name(f"a.{whole}") is None
