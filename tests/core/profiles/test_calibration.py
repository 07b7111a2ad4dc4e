"""Calibration against factors that were folded in by hand, in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from flashrl.core.profiles import Profile
from flashrl.core.profiles.calibration import (
    profile_from_activations,
    profile_from_checkpoints,
    report_drift,
)
from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.core.profiles.smoothing import collect_activation_amax
from flashrl.errors import NonFiniteError, ProfileError, UnknownNameError

LAYER = "model.layers.0"
NORM = f"{LAYER}.input_layernorm.weight"
MLP_NORM = f"{LAYER}.post_attention_layernorm.weight"
Q, K, V, OUT = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo")
GATE, UP, DOWN = (f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
LINEAR = {Q, K, V, OUT, GATE, UP, DOWN}


def read(path: Path) -> dict[str, torch.Tensor]:
    """Tensors that do not map the file, so that it can be written anew."""
    return load(path.read_bytes())


def factors(size: int) -> torch.Tensor:
    return torch.empty(size).uniform_(0.25, 4.0)


def readers_of(profile: Profile) -> dict[str, set[str]]:
    return {source: set(names) for source, names in profile.groups.items()}


class TestProfileFromCheckpoints:
    @pytest.mark.parametrize("scheme", ["int8", "fp8_channel", "fp8_tensor", "fp8_block"])
    def test_factors_that_were_folded_in_come_out(self, make_pair, scheme: str) -> None:
        folded = {NORM: factors(64), MLP_NORM: factors(64)}
        pair = make_pair(scheme=scheme, smoothing=folded, intermediate_size=160)
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        assert profile.scheme == scheme
        assert set(profile.smoothing) == set(folded)
        assert readers_of(profile) == {NORM: {Q, K, V}, MLP_NORM: {GATE, UP}}
        for norm, expected in folded.items():
            # BF16 rounds the norm on disk, by up to 2^-9.
            assert torch.allclose(profile.smoothing[norm], expected, rtol=2**-8)
            smoothed = profile.smooth(norm, pair.weights[norm])
            assert torch.equal(smoothed, read(pair.quantized / "model.safetensors")[norm])
        assert set(profile.weights) == set(profile.scales) == LINEAR
        for name, scale in pair.scales.items():
            assert torch.equal(profile.scales[name], scale)
        profile.check({name: tuple(w.shape) for name, w in pair.weights.items()})

    def test_it_is_checked_against_a_models_config(self, make_pair) -> None:
        transformers = pytest.importorskip("transformers")
        pair = make_pair(smoothing={NORM: factors(64)})
        profile = profile_from_checkpoints(pair.base, pair.quantized)

        def shapes(**changes: int) -> dict[str, tuple[int, ...]]:
            config = transformers.AutoConfig.from_pretrained(pair.base, **changes)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            return {name: tuple(p.shape) for name, p in model.named_parameters()}

        profile.check(shapes())
        with pytest.raises(ProfileError, match=rf"has 64 channels, but {NORM} is \[32\]"):
            profile.check(shapes(hidden_size=32))

    def test_a_copy_that_was_not_smoothed_has_no_factors(self, make_pair) -> None:
        pair = make_pair()
        profile = profile_from_checkpoints(pair.base, pair.quantized, static_scales=False)
        assert profile.smoothing == {}
        assert profile.groups == {}
        assert profile.scales == {}
        assert set(profile.weights) == LINEAR
        assert (profile.base_model, profile.quantized_model) == (
            str(pair.base),
            str(pair.quantized),
        )

    @pytest.mark.parametrize("scheme", ["int8", "fp8_channel"])
    def test_factors_between_linear_layers_come_out(self, make_pair, scheme: str) -> None:
        """From up to down, and v to o where the heads are as many."""
        folded = {NORM: factors(64), MLP_NORM: factors(64), UP: factors(96), V: factors(64)}
        pair = make_pair(scheme=scheme, smoothing=folded, num_key_value_heads=4)
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        assert set(profile.smoothing) == set(folded)
        for source in (UP, V):
            assert torch.allclose(profile.smoothing[source], folded[source], rtol=0.04)

    def test_a_reader_left_in_16_bit_is_smoothed_all_the_same(self, make_pair) -> None:
        """As a router is, which reads the same norm as the experts."""
        folded = {NORM: factors(64)}
        pair = make_pair(smoothing=folded)
        tensors = read(pair.quantized / "model.safetensors")
        del tensors[f"{K}_scale"]
        tensors[K] = (pair.weights[K].float() * folded[NORM]).to(torch.bfloat16)
        save_file(tensors, pair.quantized / "model.safetensors")
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        assert readers_of(profile) == {NORM: {Q, K, V}}
        assert set(profile.weights) == LINEAR - {K}
        tensors[K] = pair.weights[K]
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(ProfileError, match=f"{K} .* is off by"):
            profile_from_checkpoints(pair.base, pair.quantized)

    def test_grouped_queries_have_no_factor_between_v_and_o(self, make_pair) -> None:
        pair = make_pair(smoothing={UP: factors(96)}, num_key_value_heads=2)
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        assert profile.groups == {UP: (DOWN,)}

    def test_a_zero_in_a_norm_leaves_the_columns_to_tell(self, make_pair) -> None:
        """flash-llm-rl's profile had 0/0 there."""
        norm = torch.ones(64)
        norm[3] = norm[7] = 0.0
        dead = {name: torch.randn(rows, 64) for name, rows in ((Q, 64), (K, 32), (V, 32))}
        for weight in dead.values():
            weight[:, 7] = 0.0
        folded = {NORM: factors(64)}
        pair = make_pair(smoothing=folded, edit={NORM: norm, **dead})
        s = profile_from_checkpoints(pair.base, pair.quantized).smoothing[NORM]
        assert torch.isfinite(s).all()
        assert s[3].item() == pytest.approx(folded[NORM][3].item(), rel=0.01)
        assert s[7].item() == 1.0

    def test_a_row_of_zeros_has_scale_one(self, make_pair) -> None:
        """flash-llm-rl's least squares had 0/0 there."""
        up = torch.randn(96, 64)
        up[5] = 0.0
        pair = make_pair(smoothing={MLP_NORM: factors(64), UP: factors(96)}, edit={UP: up})
        assert pair.scales[UP][5].item() == 0.0
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        assert profile.scales[UP][5].item() == 1.0
        assert profile.smoothing[UP][5].item() == 1.0
        assert all(torch.isfinite(s).all() for s in profile.smoothing.values())

    def test_an_offset_norm_is_divided_with_its_offset(self, make_pair) -> None:
        """Gemma's norms multiply by 1 + weight."""
        pair = make_pair()
        for folder in (pair.base, pair.quantized):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
        tensors = read(pair.quantized / "model.safetensors")
        s = torch.tensor([2.0, 0.5]).repeat(32)
        tensors[NORM] = ((1 + pair.weights[NORM].float()) / s - 1).to(torch.bfloat16)
        for name in (Q, K, V):
            weight = pair.weights[name].float() * s
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        save_file(tensors, pair.quantized / "model.safetensors")
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        assert profile.norm_offset == 1.0
        assert torch.allclose(profile.smoothing[NORM], s, rtol=0.02)

    def test_every_tensor_is_reported_once(self, make_pair) -> None:
        pair = make_pair()
        calls: list[tuple[int, int, str]] = []
        profile_from_checkpoints(pair.base, pair.quantized, progress=lambda *a: calls.append(a))
        assert [done for done, _, _ in calls] == list(range(1, 10))
        assert {total for _, total, _ in calls} == {9}
        assert {name for _, _, name in calls} == LINEAR | {NORM, MLP_NORM}

    def test_a_copy_of_another_model_is_refused(self, make_pair) -> None:
        pair = make_pair()
        tensors = read(pair.quantized / "model.safetensors")
        tensors[OUT] = tensors[OUT].flip(0)
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(ProfileError, match=rf"{OUT} .* is off by 1\d\d% .*allowed: 25%"):
            profile_from_checkpoints(pair.base, pair.quantized)

    @pytest.mark.parametrize("name", [Q, UP])
    def test_a_factor_folded_in_on_one_side_only_is_refused(self, make_pair, name) -> None:
        """The linear layer is smoothed, but neither what feeds nor what reads it is."""
        pair = make_pair()
        tensors = read(pair.quantized / "model.safetensors")
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"] * 3.0
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(ProfileError, match=rf"{name} .* is off by 200%"):
            profile_from_checkpoints(pair.base, pair.quantized)

    def test_norms_of_another_sign_are_refused(self, make_pair) -> None:
        pair = make_pair()
        tensors = read(pair.quantized / "model.safetensors")
        tensors[NORM][0] *= -1
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(ProfileError, match=f"{NORM} differs in sign"):
            profile_from_checkpoints(pair.base, pair.quantized)

    @pytest.mark.parametrize(
        ("scale", "message"),
        [
            (torch.full((64, 1), float("nan")), r"is no scale of .*q_proj.weight \[64, 64\]"),
            (-torch.ones(64, 1), "finite and positive"),
        ],
    )
    def test_a_broken_scale_is_refused(self, make_pair, scale, message) -> None:
        pair = make_pair()
        tensors = read(pair.quantized / "model.safetensors")
        tensors[f"{Q}_scale"] = scale
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(ProfileError, match=message):
            profile_from_checkpoints(pair.base, pair.quantized)

    def test_another_shape_is_refused(self, make_pair) -> None:
        pair = make_pair()
        tensors = read(pair.quantized / "model.safetensors")
        tensors[Q], tensors[f"{Q}_scale"] = (
            tensors[Q][:32].clone(),
            tensors[f"{Q}_scale"][:32].clone(),
        )
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(ProfileError, match=r"is \[64, 64\] in .*, \[32, 64\] in"):
            profile_from_checkpoints(pair.base, pair.quantized)

    def test_a_weight_the_base_lacks_is_an_error(self, make_pair) -> None:
        pair = make_pair()
        tensors = read(pair.quantized / "model.safetensors")
        extra = f"{LAYER}.mlp.upp_proj.weight"
        tensors[extra], tensors[f"{extra}_scale"] = (
            tensors[UP].clone(),
            tensors[f"{UP}_scale"].clone(),
        )
        save_file(tensors, pair.quantized / "model.safetensors")
        with pytest.raises(UnknownNameError, match=f"{extra} .did you mean"):
            profile_from_checkpoints(pair.base, pair.quantized)

    @pytest.mark.parametrize("scheme", ["int8", "fp8_tensor", "fp8_block"])
    def test_weights_that_stay_on_disk_say_the_same(
        self, make_pair, scheme: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = make_pair(scheme=scheme, smoothing={NORM: factors(64), UP: factors(96)})
        whole = profile_from_checkpoints(pair.base, pair.quantized)
        monkeypatch.setattr("flashrl.core.profiles.matrices.LARGE", 0)
        monkeypatch.setattr("flashrl.core.profiles.recovery._SLICE_ELEMENTS", 64 * 5)  # 5 rows
        by_rows = profile_from_checkpoints(pair.base, pair.quantized)
        assert by_rows.groups == whole.groups
        for source, factor in whole.smoothing.items():
            assert torch.allclose(by_rows.smoothing[source], factor, rtol=1e-5)

    def test_a_pair_larger_than_memory_never_sits_in_it(self, tmp_path: Path) -> None:
        """Peak memory follows the largest tensor, not the checkpoint."""
        size, num_layers = 1024, 64
        for folder, dtype in (("base", torch.bfloat16), ("quantized", torch.int8)):
            tensors = {}
            for i in range(num_layers):
                name = f"model.layers.{i}.mlp.up_proj.weight"
                tensors[name] = torch.ones(size, size, dtype=dtype)
                if dtype == torch.int8:
                    tensors[f"{name}_scale"] = torch.ones(size, 1)
            (tmp_path / folder).mkdir()
            save_file(tensors, tmp_path / folder / "model.safetensors")
        script = """
import sys
from pathlib import Path
from flashrl.core.profiles.calibration import profile_from_checkpoints

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing torch
before = memory("VmRSS")
profile_from_checkpoints(*sys.argv[1:])
print(memory("VmHWM") - before)
"""
        folders = [str(tmp_path / folder) for folder in ("base", "quantized")]
        done = subprocess.run(
            [sys.executable, "-c", script, *folders],
            capture_output=True,
            text=True,
            check=True,
            # glibc else keeps what is freed of tensors this small.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        )
        largest, both = size * size * 2, num_layers * size * size * 3
        slices = 32 * 2**20
        assert int(done.stdout) < slices + 16 * largest < both / 2


class TestProfileFromActivations:
    @pytest.fixture
    def amax(self, make_base: Callable[..., Path]) -> tuple[Path, dict[str, torch.Tensor]]:
        transformers = pytest.importorskip("transformers")
        base = make_base()
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with collect_activation_amax(model) as amax:
            model(torch.arange(24).view(2, 12))
        return base, dict(amax)

    @pytest.mark.parametrize("alpha", [0.5, 0.8])
    def test_it_is_the_papers_formula(self, amax, alpha: float) -> None:
        base, statistics = amax
        profile = profile_from_activations(base, statistics, alpha=alpha)
        assert readers_of(profile) == {NORM: {Q, K, V}, MLP_NORM: {GATE, UP}}
        assert profile.alpha == alpha
        assert set(profile.weights) == LINEAR
        weights = dict(Checkpoint.open(base))
        for norm, readers in profile.groups.items():
            for j in range(0, 64, 7):
                w = max(abs(float(x)) for reader in readers for x in weights[reader][:, j])
                expected = float(statistics[norm][j]) ** alpha / w ** (1 - alpha)
                assert profile.smoothing[norm][j].item() == pytest.approx(expected, rel=1e-4)

    def test_statistics_of_the_readers_do_as_well(self, amax) -> None:
        base, statistics = amax
        linear = {name: s for name, s in statistics.items() if "norm" not in name}
        by_norm, by_reader = (profile_from_activations(base, s) for s in (statistics, linear))
        for norm in by_norm.smoothing:
            assert torch.equal(by_norm.smoothing[norm], by_reader.smoothing[norm])

    def test_static_scales_are_those_of_the_smoothed_weights(self, amax) -> None:
        base, statistics = amax
        calls: list[tuple[int, int, str]] = []
        profile = profile_from_activations(
            base, statistics, static_scales=True, progress=lambda *a: calls.append(a)
        )
        weights = dict(Checkpoint.open(base))
        smoothed = weights[GATE].double() * profile.smoothing[MLP_NORM].double()
        expected = smoothed.abs().amax(1, keepdim=True) / 127
        assert torch.allclose(profile.scales[GATE].double(), expected)
        assert set(profile.scales) == LINEAR
        assert [done for done, _, _ in calls] == list(range(1, calls[0][1] + 1))

    def test_missing_statistics_are_an_error(self, amax) -> None:
        base, statistics = amax
        some = {name: s for name, s in statistics.items() if "self_attn" in name}
        with pytest.raises(ProfileError, match=f"1 of 2 norms, such as {MLP_NORM}"):
            profile_from_activations(base, some)

    def test_statistics_that_are_not_finite_are_an_error(self, amax) -> None:
        base, statistics = amax
        statistics[NORM][0] = float("inf")
        with pytest.raises(NonFiniteError):
            profile_from_activations(base, statistics)


class TestReportDrift:
    def test_weights_that_grew_saturate_a_static_scale_and_not_a_dynamic_one(self) -> None:
        """flash-llm-rl kept its scales: at 0.01, 1.6 becomes 1.27."""
        profile = Profile(scheme="int8", scales={UP: torch.full((1, 1), 0.01)})
        (drift,) = report_drift(profile, [("module." + UP, torch.tensor([[1.6, 0.5]]))])
        assert drift.name == UP
        assert drift.clipped_fraction == 0.5
        size = (1.6**2 + 0.5**2) ** 0.5
        assert drift.static_error == pytest.approx((1.6 - 1.27) / size, rel=1e-4)
        assert drift.dynamic_error * size <= 1.6 / 127 / 2 + 1e-6

    def test_a_fresh_profile_has_not_drifted(self, make_pair) -> None:
        pair = make_pair(smoothing={NORM: factors(64), UP: factors(96)})
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        calls: list[tuple[int, int, str]] = []
        drifts = report_drift(
            profile, Checkpoint.open(pair.base), progress=lambda *a: calls.append(a)
        )
        assert {drift.name for drift in drifts} == LINEAR
        assert [done for done, total, _ in calls] == list(range(1, 8))
        for drift in drifts:
            assert drift.static_error == pytest.approx(drift.dynamic_error, rel=0.1)
            assert drift.static_error < 0.02

    def test_zeros_have_no_error(self) -> None:
        profile = Profile(scheme="int8", scales={UP: torch.ones(2, 1)})
        (drift,) = report_drift(profile, [(UP, torch.zeros(2, 3))])
        assert (drift.clipped_fraction, drift.static_error, drift.dynamic_error) == (0.0, 0.0, 0.0)

    def test_a_profile_without_scales_is_an_error(self) -> None:
        with pytest.raises(ProfileError, match="0 static scales"):
            report_drift(Profile(scheme="int8"), [(UP, torch.ones(2, 2))])
