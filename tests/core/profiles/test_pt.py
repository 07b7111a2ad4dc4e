"""The original's profile.pt: its formula in float64, and its own code where it is installed."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashrl.core.profiles import Profile
from flashrl.core.profiles.calibration import profile_from_checkpoints
from flashrl.core.profiles.pruning import DeadChannelPruner
from flashrl.core.profiles.pt import load_profile_pt, save_profile_pt
from flashrl.core.quantize import quantize_into
from flashrl.core.schemes import get_scheme
from flashrl.errors import ProfileError

LAYER = "model.layers.0"
NORM = f"{LAYER}.input_layernorm.weight"
MLP_NORM = f"{LAYER}.post_attention_layernorm.weight"
Q, K, V, OUT = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo")
GATE, UP, DOWN = (f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
LINEAR = (Q, K, V, OUT, GATE, UP, DOWN)

needs_original = pytest.mark.skipif(
    not importlib.util.find_spec("flash_rl") or not importlib.util.find_spec("compressed_tensors"),
    reason="needs flash-llm-rl 1.0.3 (without its dependencies) and compressed-tensors",
)


def factors(size: int) -> torch.Tensor:
    return torch.empty(size).uniform_(0.25, 4.0)


@pytest.fixture
def pair(make_pair):
    return make_pair(smoothing={NORM: factors(64), MLP_NORM: factors(64), UP: factors(96)})


@pytest.fixture
def profile(pair) -> Profile:
    return profile_from_checkpoints(pair.base, pair.quantized)


def consume(entry: dict[str, object], tensor: torch.Tensor) -> torch.Tensor:
    """What the original makes of a pushed tensor, in float64, before it rounds."""
    value = tensor.double()
    for key in ("output_scale", "input_scale"):
        factor = entry[key]
        value = value * (factor.double() if isinstance(factor, torch.Tensor) else factor)
    return value.clamp(-127, 127) if entry["type"] == torch.int8 else value


def quantized_by_profile(profile: Profile, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The 8-bit values that this package makes of a weight with the profile's static scale."""
    out = torch.empty(weight.shape, dtype=torch.int8)
    smoothed = profile.smooth(name, weight, dtype=torch.float32)
    scheme = get_scheme("int8").evolve(dynamic=False)
    quantize_into(smoothed, out, profile.scale_for(name).clone(), scheme=scheme)
    return out


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


class TestSave:
    def test_what_is_written_does_to_a_weight_what_the_profile_does(
        self, profile, pair, tmp_path
    ) -> None:
        save_profile_pt(profile, tmp_path / "profile.pt")
        content = torch.load(tmp_path / "profile.pt", weights_only=True)
        assert set(content) == {NORM, MLP_NORM, *LINEAR}
        for name, entry in content.items():
            assert set(entry) == {"input_scale", "output_scale", "type"}
            consumed = consume(entry, pair.weights[name])
            if name in LINEAR:
                ours = quantized_by_profile(profile, name, pair.weights[name])
                assert entry["type"] == torch.int8
                assert steps_apart(consumed, ours) <= 0.5 + 1e-4
            else:
                ours = profile.smooth(name, pair.weights[name])
                assert torch.allclose(consumed, ours.double(), rtol=2**-8)

    def test_it_can_be_read_back(self, profile, tmp_path) -> None:
        save_profile_pt(profile, tmp_path / "profile.pt")
        loaded = load_profile_pt(tmp_path / "profile.pt")
        assert loaded.scheme == "int8"
        assert {k: set(v) for k, v in loaded.groups.items()} == {
            k: set(v) for k, v in profile.groups.items()
        }
        for field in ("smoothing", "scales"):
            ours, theirs = getattr(profile, field), getattr(loaded, field)
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert torch.allclose(tensor, theirs[name], rtol=1e-5), name

    def test_without_smoothing_the_factors_are_plain_ones(self, make_pair, tmp_path) -> None:
        pair = make_pair()
        profile = profile_from_checkpoints(pair.base, pair.quantized)
        save_profile_pt(profile, tmp_path / "profile.pt")
        content = torch.load(tmp_path / "profile.pt", weights_only=True)
        assert set(content) == set(LINEAR)
        assert all(entry["input_scale"] == 1.0 for entry in content.values())
        assert load_profile_pt(tmp_path / "profile.pt").smoothing == {}

    def test_a_router_that_is_smoothed_keeps_its_type(self, tmp_path) -> None:
        router = f"{LAYER}.mlp.gate.weight"
        profile = Profile(
            scheme="int8",
            smoothing={MLP_NORM: factors(4)},
            groups={MLP_NORM: (router, UP)},
            scales={UP: torch.ones(2, 1)},
        )
        save_profile_pt(profile, tmp_path / "profile.pt")
        entry = torch.load(tmp_path / "profile.pt", weights_only=True)[router]
        assert entry["type"] == torch.bfloat16
        assert torch.equal(entry["input_scale"].flatten(), profile.smoothing[MLP_NORM])

    def test_fp8_is_a_list_of_names(self, tmp_path) -> None:
        save_profile_pt(Profile(scheme="fp8_tensor", weights=[Q, K]), tmp_path / "profile.pt")
        assert torch.load(tmp_path / "profile.pt", weights_only=True) == [Q, K]
        loaded = load_profile_pt(tmp_path / "profile.pt", scheme="fp8_tensor")
        assert (loaded.scheme, loaded.weights) == ("fp8_tensor", (Q, K))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"weights": [Q, K]}, "1 weights have no static scale"),
            ({"norm_offset": 1.0}, "add an offset"),
            ({"scheme": "bf16", "scales": {}}, "bf16, not int8"),
            (
                {"smoothing": {Q: torch.ones(2)}, "groups": {Q: (OUT,)}},
                "smooths weights other than up_proj",
            ),
        ],
    )
    def test_what_the_format_cannot_hold_is_an_error(self, tmp_path, changes, message) -> None:
        facts = {"scheme": "int8", "scales": {Q: torch.ones(2, 1)}, **changes}
        with pytest.raises(ProfileError, match=message):
            save_profile_pt(Profile(**facts), tmp_path / "profile.pt")
        assert list(tmp_path.iterdir()) == []

    def test_fp8_factors_would_be_lost(self, tmp_path) -> None:
        profile = Profile(scheme="fp8_channel", smoothing={NORM: factors(2)}, groups={NORM: (Q,)})
        with pytest.raises(ProfileError, match="would lose the smoothing"):
            save_profile_pt(profile, tmp_path / "profile.pt")


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


class TestLoad:
    @pytest.mark.parametrize("nested", [False, True])
    def test_a_pickle_with_code_is_refused_and_not_run(self, tmp_path, nested: bool) -> None:
        payload = Payload(tmp_path / "ran")
        torch.save({Q: payload} if nested else payload, tmp_path / "profile.pt")
        with pytest.raises(ProfileError, match="could run code; it was not loaded"):
            load_profile_pt(tmp_path / "profile.pt")
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("protocol", [2, 4])
    def test_a_bare_pickle_is_refused_without_a_warning(self, tmp_path, protocol: int) -> None:
        content = pickle.dumps(Payload(tmp_path / "ran"), protocol=protocol)
        (tmp_path / "profile.pt").write_bytes(content)
        with pytest.raises(ProfileError, match="it was not loaded"):
            load_profile_pt(tmp_path / "profile.pt")
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (torch.ones(2), "holds a Tensor"),
            ([1, 2], "holds a list"),
            ({Q: {"input_scale": 1.0}}, "must be a dict of input_scale, output_scale, type"),
            ({Q: 3}, "got int"),
            ({3: {}}, "entry 3"),
            (
                {Q: {"input_scale": None, "output_scale": 1.0, "type": torch.int8}},
                "input_scale of .* is a NoneType",
            ),
            (
                {
                    NORM: {
                        "input_scale": torch.tensor([float("nan"), 1.0]),
                        "output_scale": 1.0,
                        "type": torch.bfloat16,
                    }
                },
                "1 of 2 values of input_scale .* zero; make the profile anew",
            ),
            (
                {
                    Q: {
                        "input_scale": torch.full((1, 2), 3.0),
                        "output_scale": torch.ones(2, 1),
                        "type": torch.int8,
                    }
                },
                "input_scale of .*q_proj.weight is not that of the norm",
            ),
        ],
    )
    def test_another_structure_is_an_error(self, tmp_path, content, message: str) -> None:
        torch.save(content, tmp_path / "profile.pt")
        with pytest.raises(ProfileError, match=message):
            load_profile_pt(tmp_path / "profile.pt")

    def test_no_file_and_damage_are_errors(self, tmp_path) -> None:
        with pytest.raises(ProfileError, match=r"no readable profile\.pt"):
            load_profile_pt(tmp_path / "profile.pt")
        (tmp_path / "profile.pt").write_bytes(b"PK\x03\x04 half a file")
        with pytest.raises(ProfileError, match=r"profile\.pt"):
            load_profile_pt(tmp_path / "profile.pt")


@needs_original
class TestTheOriginal:
    """flash-llm-rl 1.0.3's own functions, in a process of their own."""

    def run(self, body: str, *args: object) -> None:
        script = f"""
import sys
import torch
torch.cuda.current_device = lambda: "cpu"  # the original puts every factor on the GPU
from flash_rl import flash_quantization as original
{body}
"""
        env = {name: value for name, value in os.environ.items() if name != "FLASHRL_CONFIG"}
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *map(str, args)],
            check=True,
            env={**env, "HF_HUB_OFFLINE": "1"},
        )

    def test_it_reads_what_is_written_here(self, profile, pair, tmp_path) -> None:
        save_profile_pt(profile, tmp_path / "profile.pt")
        torch.save(dict(pair.weights), tmp_path / "weights.pt")
        self.run(
            """
profile, weights = torch.load(sys.argv[1]), torch.load(sys.argv[2])
torch.save(dict(original.get_quantize_fn("int8")(weights.items(), profile)), sys.argv[3])
""",
            *(tmp_path / name for name in ("profile.pt", "weights.pt", "out.pt")),
        )
        theirs = torch.load(tmp_path / "out.pt", weights_only=True)
        for name in LINEAR:
            ours = quantized_by_profile(profile, name, pair.weights[name])
            assert theirs[name].dtype == torch.int8
            # They multiply by an inverse, so a tie may fall to the other side.
            assert steps_apart(theirs[name], ours) <= 1
            assert (theirs[name] != ours).double().mean() < 0.005

    @pytest.mark.parametrize("smoothed", [True, False])
    def test_what_it_writes_is_read_here(self, make_pair, tmp_path, smoothed: bool) -> None:
        folded = {NORM: factors(64), MLP_NORM: factors(64), UP: factors(96)} if smoothed else {}
        pair = make_pair(smoothing=folded)
        self.run(
            """
class NoTokenizer:
    from_pretrained = staticmethod(lambda path: None)
original.AutoTokenizer = NoTokenizer  # loaded, and never used
original.profiling_int8(*sys.argv[1:])
""",
            pair.base,
            pair.quantized,
            tmp_path / "profile.pt",
        )
        theirs = load_profile_pt(tmp_path / "profile.pt")
        ours = profile_from_checkpoints(pair.base, pair.quantized)
        assert set(theirs.weights) == set(ours.weights)
        for name, s in ours.smoothing.items():
            assert torch.allclose(theirs.smoothing[name], s, rtol=1e-2), name
        for name in LINEAR:
            a = quantized_by_profile(theirs, name, pair.weights[name])
            b = quantized_by_profile(ours, name, pair.weights[name])
            assert steps_apart(a, b) <= 2, name

    def test_its_pruning_zeroes_the_same_channels(self, profile, pair, tmp_path) -> None:
        save_profile_pt(profile, tmp_path / "profile.pt")
        weights = {name: weight.clone() for name, weight in pair.weights.items()}
        for name in (Q, K, V, GATE):
            weights[name][:, [2, 9]] = 0.0
        torch.save(weights, tmp_path / "weights.pt")
        self.run(
            """
profile, weights = torch.load(sys.argv[1]), torch.load(sys.argv[2])
torch.save(dict(original.get_quantize_fn("int8_prune")(weights.items(), profile)), sys.argv[3])
""",
            *(tmp_path / name for name in ("profile.pt", "weights.pt", "out.pt")),
        )
        theirs = torch.load(tmp_path / "out.pt", weights_only=True)
        pruner = DeadChannelPruner(groups=profile.groups)
        engine: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            loaded = profile.smooth(name, weight)
            if name in LINEAR:
                loaded = quantized_by_profile(profile, name, weight)
            engine |= pruner.load(name, loaded)
        for norm, dead in ((NORM, [2, 9]), (MLP_NORM, [])):
            assert (theirs[norm] == 0).nonzero().flatten().tolist() == dead
            assert torch.equal(engine[norm].float(), theirs[norm].float())
