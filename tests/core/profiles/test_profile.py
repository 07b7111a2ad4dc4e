"""Profiles: what they do to a tensor, what they refuse, what survives the disk."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flashrl.core.profiles import Profile
from flashrl.errors import ProfileError

LAYER = "model.layers.0"
NORM = f"{LAYER}.post_attention_layernorm.weight"
GATE, UP, DOWN = (f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
SHAPES = {NORM: (4,), GATE: (3, 4), UP: (3, 4), DOWN: (4, 3)}


def make_profile(**changes: object) -> Profile:
    facts = {
        "scheme": "int8",
        "smoothing": {NORM: torch.tensor([1.0, 2.0, 4.0, 0.5]), UP: torch.tensor([1.0, 3.0, 0.25])},
        "groups": {NORM: (GATE, UP), UP: (DOWN,)},
        "scales": {name: torch.full((SHAPES[name][0], 1), 0.01) for name in (GATE, UP, DOWN)},
        "base_model": "base",
        "alpha": 0.5,
    }
    return Profile(**{**facts, **changes})


class TestSmooth:
    def test_a_norm_is_divided_and_its_readers_multiplied(self) -> None:
        profile = make_profile()
        assert profile.smooth(NORM, torch.ones(4)).tolist() == [1.0, 0.5, 0.25, 2.0]
        assert profile.smooth(GATE, torch.ones(3, 4))[2].tolist() == [1.0, 2.0, 4.0, 0.5]

    def test_a_weight_can_read_one_group_and_feed_another(self) -> None:
        smoothed = make_profile().smooth(UP, torch.ones(3, 4))
        expected = [[s / row for s in (1.0, 2.0, 4.0, 0.5)] for row in (1.0, 3.0, 0.25)]
        assert torch.allclose(smoothed, torch.tensor(expected))
        assert make_profile().smooth(DOWN, torch.ones(4, 3))[0].tolist() == [1.0, 3.0, 0.25]

    def test_the_bias_of_a_source_is_divided_too(self) -> None:
        profile = make_profile(norm_offset=1.0)
        assert profile.smooth(
            UP.replace("weight", "bias"), torch.ones(3)
        ).tolist() == pytest.approx([1.0, 1 / 3, 4.0])
        assert profile.smooth(NORM.replace("weight", "bias"), torch.ones(4)).tolist() == [
            *(1.0, 0.5, 0.25, 2.0)
        ]
        bias = torch.ones(4)
        assert profile.smooth(DOWN.replace("weight", "bias"), bias) is bias

    def test_gemmas_norms_multiply_by_one_plus_their_weight(self) -> None:
        weight = torch.tensor([0.0, 1.0, 3.0, -0.5])
        smoothed = make_profile(norm_offset=1.0).smooth(NORM, weight)
        assert (1 + smoothed).tolist() == [1.0, 1.0, 1.0, 1.0]

    def test_what_is_not_in_it_passes_through(self) -> None:
        tensor = torch.ones(2, 2)
        assert make_profile().smooth("model.embed_tokens.weight", tensor) is tensor
        assert make_profile().smooth("lm_head.weight", tensor, dtype=torch.float64).dtype == (
            torch.float64
        )

    def test_one_tensor_at_a_time_in_any_spelling(self) -> None:
        """flash-llm-rl's pruning indexed every entry of the profile, so one tensor was too few."""
        expected = make_profile().smooth(GATE, torch.ones(3, 4))
        for prefix in ("module.", "base_model.model.", "_orig_mod."):
            assert torch.equal(make_profile().smooth(prefix + GATE, torch.ones(3, 4)), expected)
        multimodal = GATE.replace("model.", "model.language_model.", 1)
        assert torch.equal(make_profile().smooth(multimodal, torch.ones(3, 4)), expected)

    def test_a_fused_weight_takes_what_its_parts_share(self) -> None:
        factors = torch.tensor([1.0, 2.0, 4.0, 0.5])
        fused = GATE.replace("gate_proj", "gate_up_proj")
        apart = make_profile(smoothing={NORM: factors}, groups={NORM: (GATE, UP)})
        whole = make_profile(smoothing={NORM: factors}, groups={NORM: (fused,)})
        assert apart.smooth(fused, torch.ones(6, 4))[5].tolist() == factors.tolist()
        assert whole.smooth(UP, torch.ones(3, 4))[0].tolist() == factors.tolist()

    def test_a_fused_weight_whose_parts_differ_is_an_error(self) -> None:
        with pytest.raises(ProfileError, match=r"differently; smooth .*up_proj.* apart"):
            make_profile().smoothing_for(GATE.replace("gate_proj", "gate_up_proj"))

    def test_a_stack_of_experts_takes_what_they_share(self) -> None:
        experts = f"{LAYER}.mlp.experts"
        gates = [f"{experts}.{i}.gate_proj.weight" for i in range(2)]
        profile = Profile(
            scheme="int8", smoothing={NORM: torch.tensor([1.0, 2.0])}, groups={NORM: gates}
        )
        smoothed = profile.smooth(f"{experts}.gate_up_proj", torch.ones(2, 3, 2))
        assert torch.equal(smoothed, torch.tensor([1.0, 2.0]).expand(2, 3, 2))


class TestScaleFor:
    def test_it_is_found_in_any_spelling(self) -> None:
        assert torch.equal(make_profile().scale_for("module." + UP), torch.full((3, 1), 0.01))
        assert make_profile().scale_for("lm_head.weight") is None

    def test_the_one_scale_of_a_fused_weight_holds_for_each_part(self) -> None:
        """nm-vllm#336: one scale on disk where the engine wants three."""
        qkv = f"{LAYER}.self_attn.qkv_proj.weight"
        profile = Profile(scheme="fp8_tensor", scales={qkv: torch.tensor([0.5])})
        for part in ("q_proj", "k_proj", "v_proj"):
            assert profile.scale_for(qkv.replace("qkv_proj", part)).tolist() == [0.5]

    def test_the_rows_of_parts_make_up_the_fused_weight(self) -> None:
        scales = {UP: torch.full((3, 1), 2.0), GATE: torch.full((3, 1), 1.0)}
        fused = make_profile(scales=scales).scale_for(GATE.replace("gate_proj", "gate_up_proj"))
        assert fused.flatten().tolist() == [1.0] * 3 + [2.0] * 3

    @pytest.mark.parametrize(
        ("scheme", "scales", "asked"),
        [
            ("fp8_tensor", {GATE: (1,), UP: (1,)}, "gate_up_proj"),
            ("int8", {GATE: (3, 1)}, "gate_up_proj"),
            ("int8", {GATE.replace("gate_proj", "gate_up_proj"): (6, 1)}, "up_proj"),
        ],
    )
    def test_what_cannot_be_told_apart_is_an_error(self, scheme, scales, asked) -> None:
        profile = Profile(scheme=scheme, scales={k: torch.ones(v) for k, v in scales.items()})
        with pytest.raises(ProfileError, match="load it in those pieces"):
            profile.scale_for(GATE.replace("gate_proj", asked))


class TestValidation:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
    @pytest.mark.parametrize("field", ["smoothing", "scales"])
    def test_factors_and_scales_are_finite_and_positive(self, field: str, bad: float) -> None:
        tensors = dict(getattr(make_profile(), field))
        tensors[UP] = tensors[UP].clone()
        tensors[UP][1] = bad
        with pytest.raises(ProfileError, match=f"1 of 3 values .* {UP} are NaN"):
            make_profile(**{field: tensors})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"scheme": "int7"}, "unknown scheme; known: .*int8"),
            ({"smoothing": {NORM: torch.ones(2, 2)}}, r"must be \(channels,\), got \[2, 2\]"),
            ({"groups": {NORM: (GATE,)}}, f"{UP} has a smoothing factor or a group"),
            ({"groups": {NORM: (GATE, DOWN), UP: (DOWN,)}}, f"{DOWN} stands in more than one"),
        ],
    )
    def test_contradictions_are_errors(self, changes, message: str) -> None:
        with pytest.raises(ProfileError, match=message):
            make_profile(**changes)

    def test_all_faults_come_at_once(self) -> None:
        with pytest.raises(ProfileError) as error:
            make_profile(scheme="int7", smoothing={NORM: torch.zeros(4)})
        assert "unknown scheme" in str(error.value)
        assert "4 of 4 values" in str(error.value)
        assert f"{UP} has a smoothing factor or a group" in str(error.value)

    def test_it_fits_the_model_it_is_of(self) -> None:
        make_profile().check({f"module.{name}": shape for name, shape in SHAPES.items()})
        fused = {GATE.replace("gate_proj", "gate_up_proj"): (6, 4), NORM: (4,), DOWN: (4, 3)}
        apart = make_profile(smoothing={NORM: torch.ones(4)}, groups={NORM: (GATE, UP)})
        apart.check(fused)

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ({NORM: (5,)}, r"has 4 channels, but .*post_attention_layernorm.weight is \[5\]"),
            ({GATE: (3, 5)}, r"has 4 channels, but .*gate_proj.weight is \[3, 5\]"),
            ({UP: (2, 4)}, r"scale of .*up_proj.weight is \[3, 1\], but int8 on \[2, 4\]"),
            ({DOWN: None}, f"{DOWN} is not a parameter of the model"),
        ],
    )
    def test_another_model_is_refused(self, shapes, message: str) -> None:
        model = {name: shape for name, shape in {**SHAPES, **shapes}.items() if shape}
        with pytest.raises(ProfileError, match=message):
            make_profile().check(model)

    def test_many_faults_are_cut(self) -> None:
        smoothing = {f"n{i}.weight": torch.zeros(1) for i in range(12)}
        with pytest.raises(ProfileError, match="and 4 more"):
            Profile(scheme="int8", smoothing=smoothing, groups=dict.fromkeys(smoothing, ()))


def same(a: Profile, b: Profile) -> bool:
    def plain(profile: Profile) -> dict[str, object]:
        facts = attrs.asdict(profile, recurse=False)
        for field in ("smoothing", "scales"):
            facts[field] = {name: tensor.tolist() for name, tensor in facts[field].items()}
        return facts

    return plain(a) == plain(b)


class TestDisk:
    @given(
        st.lists(st.floats(2**-20, 2**20, width=32), min_size=1, max_size=5),
        st.sampled_from(["int8", "fp8_channel"]),
        st.none() | st.floats(0, 1),
        st.text(max_size=8),
    )
    def test_what_is_saved_is_what_is_loaded(
        self, tmp_path_factory, factors, scheme, alpha, model
    ) -> None:
        path = tmp_path_factory.mktemp("profile") / "p.safetensors"
        profile = Profile(
            scheme=scheme,
            smoothing={NORM: torch.tensor(factors)},
            groups={NORM: (GATE,)},
            scales={GATE: torch.tensor(factors).unsqueeze(1)},
            weights=[GATE, DOWN],
            alpha=alpha,
            base_model=model,
            norm_offset=1.0,
        )
        profile.save(path)
        assert same(Profile.load(path), profile)

    def test_an_empty_profile_survives(self, tmp_path) -> None:
        profile = Profile(scheme="fp8_channel")
        profile.save(tmp_path / "p.safetensors")
        assert same(Profile.load(tmp_path / "p.safetensors"), profile)

    def test_tensors_that_share_memory_are_saved(self, tmp_path) -> None:
        shared = torch.arange(1.0, 9.0).view(4, 2).t()
        profile = Profile(
            scheme="int8",
            smoothing={NORM: shared[0], UP: shared[0]},
            groups={NORM: (GATE, UP), UP: (DOWN,)},
        )
        profile.save(tmp_path / "p.safetensors")
        assert same(Profile.load(tmp_path / "p.safetensors"), profile)

    def test_a_failed_save_leaves_the_old_file(self, tmp_path, monkeypatch) -> None:
        path = tmp_path / "p.safetensors"
        make_profile().save(path)

        def fail(tensors, target, metadata):
            target.write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr("flashrl.core.profiles.profile.save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            make_profile(alpha=0.75).save(path)
        assert Profile.load(path).alpha == 0.5
        assert [file.name for file in tmp_path.iterdir()] == ["p.safetensors"]

    def test_other_files_are_refused(self, tmp_path) -> None:
        path = tmp_path / "p.safetensors"
        with pytest.raises(ProfileError, match="no readable safetensors file"):
            Profile.load(path)
        torch.save({}, path)
        with pytest.raises(ProfileError, match="load_profile_pt"):
            Profile.load(path)
        save_file({"a": torch.ones(1)}, path)
        with pytest.raises(ProfileError, match="format None"):
            Profile.load(path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": "2"}, "version '2'; .* version 1 is readable"),
            ({"facts": "{"}, "is damaged"),
            ({"facts": "{}"}, "is damaged"),
            ({"facts": json.dumps({"scheme": "int8", "surprise": 1})}, "is damaged"),
        ],
    )
    def test_damage_is_an_error(self, tmp_path, changes, message: str) -> None:
        path = tmp_path / "p.safetensors"
        facts = json.dumps({"scheme": "int8"})
        metadata = {"format": "flashrl.profile", "version": "1", "facts": facts, **changes}
        save_file({"smoothing:a": torch.ones(1)} if not changes else {}, path, metadata=metadata)
        with pytest.raises(ProfileError, match=message):
            Profile.load(path)

    def test_an_unknown_tensor_is_damage(self, tmp_path) -> None:
        path = tmp_path / "p.safetensors"
        make_profile().save(path)
        metadata = {
            "format": "flashrl.profile",
            "version": "1",
            "facts": json.dumps({"scheme": "int8"}),
        }
        save_file({**load_file(path), "surprise": torch.ones(1)}, path, metadata=metadata)
        with pytest.raises(ProfileError, match="damaged: 'surprise'"):
            Profile.load(path)
