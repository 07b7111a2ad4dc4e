"""Profiles from the command line: made from pairs and prompts, shown, checked and compared."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from flashrl.core.profiles import Profile
from flashrl.core.profiles.pt import load_profile_pt
from flashrl.testing import make_checkpoint

LAYERS = [f"model.layers.{layer}." for layer in range(2)]
NORM, MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
READERS = {
    NORM: [f"self_attn.{part}_proj.weight" for part in "qkv"],
    MLP_NORM: [f"mlp.{part}_proj.weight" for part in ("gate", "up")],
}
FP8_MAX = 448.0


@attrs.frozen
class Pair:
    base: Path
    copy: Path
    folded: Mapping[str, torch.Tensor]


def quantize(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By hand, in float64: 8-bit values, and the scale as compressed-tensors stores it."""
    qmax = 127.0 if kind == "int8" else FP8_MAX
    scale = weight.abs().amax(1, keepdim=True) / qmax
    if kind == "fp8_tensor":
        scale = weight.abs().amax().view(1) / qmax
    values = weight / scale
    as_int = kind == "int8"
    return values.round().to(torch.int8) if as_int else values.to(torch.float8_e4m3fn), scale


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Pair]:
    """A tiny checkpoint, and a W8A8 copy as SmoothQuant makes one."""

    def make(kind: str = "int8", *, smooth: bool = True) -> Pair:
        base = make_checkpoint(tmp_path / "base").path
        tensors = {name: w.double() for name, w in load_file(base / "model.safetensors").items()}
        folded: dict[str, torch.Tensor] = {}
        for layer in LAYERS if smooth else []:
            for norm, readers in READERS.items():
                s = folded[layer + norm] = torch.empty(64, dtype=torch.float64).uniform_(0.25, 4.0)
                tensors[layer + norm] /= s
                for reader in readers:
                    tensors[layer + reader] *= s
        written = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                written[name], scale = quantize(tensor, kind)
                written[f"{name}_scale"] = scale.float()
            else:
                written[name] = tensor.to(torch.bfloat16)
        copy = tmp_path / "copy"
        copy.mkdir()
        save_file(written, copy / "model.safetensors")
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if kind == "int8" else "float-quantized",
            "ignore": ["lm_head"],
        }
        (copy / "config.json").write_text(json.dumps(config))
        return Pair(base, copy, folded)

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """One prompt of each kind that a line may hold."""
    lines: list[Any] = [
        "what is 12 + 34 ?",
        {"prompt": "the answer is 46", "answer": 46},
        {"text": "question : 1 + 1 ="},
        {"messages": [{"role": "user", "content": "12 + 34 ="}]},
        {"prompt": [{"role": "user", "content": "3 + 4 ="}]},
        {"input_ids": [1, 5, 9, 17]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    return path


class TestFromAPair:
    @pytest.mark.parametrize("option", ["-qm", "-q", "--quantized"])
    def test_the_command_of_the_readme(
        self, option: str, flashrl: Callable[..., Any], make_pair: Callable[..., Pair]
    ) -> None:
        pair = make_pair()
        output = pair.base.parent / "profile.32b.pt"
        result = flashrl(
            *("profile", "-m", str(pair.base), option, str(pair.copy)),
            *("-o", str(output), "--fn", "int8"),
        )
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""  # quiet without a terminal
        assert str(output) in result.stdout
        # The entries of flash-llm-rl: w becomes round(w * output_scale * input_scale).
        entries = torch.load(output, weights_only=True)
        base = load_file(pair.base / "model.safetensors")
        copy = load_file(pair.copy / "model.safetensors")
        for layer in LAYERS:
            for name in (*READERS[NORM], *READERS[MLP_NORM], "mlp.down_proj.weight"):
                entry = entries[layer + name]
                q = base[layer + name].float() * entry["output_scale"] * entry["input_scale"]
                off = (q.round() - copy[layer + name]).abs()
                # The norm on disk is BF16, so its factor is off by up to 2^-9.
                assert off.max() <= 1
                assert entry["type"] is torch.int8
            norm = entries[layer + NORM]
            smoothed = (base[layer + NORM] * norm["input_scale"]).to(torch.bfloat16)
            assert torch.equal(smoothed, copy[layer + NORM])

    @pytest.mark.parametrize(
        ("kind", "fn"),
        [("int8", "int8"), ("fp8_channel", "fp8_channel"), ("fp8_tensor", "fp8")],
    )
    def test_the_factors_that_were_folded_in_come_out(
        self, kind: str, fn: str, flashrl: Callable[..., Any], make_pair: Callable[..., Pair]
    ) -> None:
        pair = make_pair(kind)
        output = pair.base.parent / "p.safetensors"
        found = flashrl(
            *("profile", "-m", str(pair.base), "-qm", str(pair.copy)),
            *("-o", str(output), "--fn", fn, "--json"),
        ).data
        profile = Profile.load(output)
        assert set(profile.smoothing) == set(found["smoothing"]) == set(pair.folded)
        for norm, s in pair.folded.items():
            assert torch.allclose(profile.smoothing[norm].double(), s, rtol=2**-8)
            assert found["smoothing"][norm]["largest"] == float(profile.smoothing[norm].max())
        assert (found["scheme"], found["num_static_scales"]) == (kind, 14)
        assert found["base_model"] == profile.base_model == str(pair.base)
        assert found["quantized_model"] == profile.quantized_model == str(pair.copy)

    def test_static_scales_can_be_left_out(
        self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair]
    ) -> None:
        pair = make_pair()
        common = ["profile", "-m", str(pair.base), "-qm", str(pair.copy), "--no-static-scales"]
        output = pair.base.parent / "p.pt"
        assert flashrl(*common, "-o", str(output.with_suffix(".safetensors"))).exit_code == 0
        assert Profile.load(output.with_suffix(".safetensors")).scales == {}
        output.with_suffix(".safetensors").unlink()
        refused = flashrl(*common, "-o", str(output))  # flash-llm-rl's format needs them
        assert refused.exit_code == 2
        assert "kept as" in refused.stderr
        assert not output.exists()
        assert len(Profile.load(output.with_suffix(".safetensors")).smoothing) == 4

    def test_of_an_fp8_copy_alone_the_names_are_kept(
        self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair]
    ) -> None:
        """As flash-llm-rl's profile for fp8 is a list of names."""
        pair = make_pair("fp8_channel", smooth=False)
        output = pair.base.parent / "p.pt"
        result = flashrl("profile", "-q", str(pair.copy), "-o", str(output), "--fn", "fp8")
        assert result.exit_code == 0, result.stderr
        names = torch.load(output, weights_only=True)
        stored = load_file(pair.copy / "model.safetensors")
        assert set(names) == {n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn}

    def test_another_fn_than_the_copy_is_refused(
        self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair]
    ) -> None:
        pair = make_pair("fp8_tensor")
        for fn in ("int8", "fp8_channel"):
            result = flashrl(
                *("profile", "-m", str(pair.base), "-qm", str(pair.copy)),
                *("-o", str(pair.base.parent / "p.pt"), "--fn", fn),
            )
            assert result.exit_code == 2
            assert "pass --fn fp8_tensor" in result.stderr

    def test_a_copy_of_another_model_is_refused(
        self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair], tmp_path: Path
    ) -> None:
        pair = make_pair(smooth=False)
        other = make_checkpoint(tmp_path / "other", seed=1).path
        output = tmp_path / "p.pt"
        result = flashrl("profile", "-m", str(other), "-qm", str(pair.copy), "-o", str(output))
        assert result.exit_code == 2
        assert not output.exists()

    @pytest.mark.parametrize(
        ("num_layers", "size", "hidden"), [(128, 1024, 512), (3, 8192, 4096)], ids=["many", "large"]
    )
    def test_peak_memory_is_that_of_a_few_tensors(
        self, tmp_path: Path, num_layers: int, size: int, hidden: int
    ) -> None:
        """Of many weights, and of rows where one is large: 64 MB, and its copy half of that."""
        generator = torch.Generator().manual_seed(0)
        for layer in range(num_layers):
            weight = torch.randn(size, hidden, generator=generator).to(torch.bfloat16)
            values, scale = quantize(weight.float(), "int8")
            name = f"model.layers.{layer}.mlp.up_proj.weight"
            for folder, tensors in (
                ("base", {name: weight}),
                ("copy", {name: values, f"{name}_scale": scale}),
            ):
                (tmp_path / folder).mkdir(exist_ok=True)
                save_file(tensors, tmp_path / folder / f"model-{layer}.safetensors")
        code = (
            "import sys, torch\n"
            "from flashrl.cli import main\n"
            "import flashrl.cli.profile, flashrl.core.profiles.calibration\n"
            "import flashrl.core.profiles.files\n"
            "def peak():\n"
            "    lines = open('/proc/self/status').read().splitlines()\n"
            "    return next(int(s.split()[1]) for s in lines if s.startswith('VmHWM')) * 1024\n"
            "before = peak()\n"
            "try: main(['profile', '-m', 'base', '-qm', 'copy', '-o', 'p.pt'])\n"
            "except SystemExit as exit: assert not exit.code\n"
            "print(peak() - before, file=sys.stderr)\n"
        )
        # glibc else keeps what is freed of tensors this small.
        environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        both = sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors"))
        assert int(done.stderr) < both / 4, done.stderr
        assert len(load_profile_pt(tmp_path / "p.pt").scales) == num_layers


class TestFromPrompts:
    def test_it_is_smoothquants_formula_on_what_the_model_computes(
        self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair], prompts: Path
    ) -> None:
        pair = make_pair()
        output = prompts.parent / "p.safetensors"
        result = flashrl(
            *("profile", "-m", str(pair.base), "--calibrate", str(prompts)),
            *("--alpha", "0.7", "-o", str(output), "--json"),
        )
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        assert (result.data["alpha"], result.data["num_smoothed"]) == (0.7, 4)
        profile = Profile.load(output)
        assert len(profile.scales) == 14
        # A reference of its own: the first norm sees the embeddings alone.
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(pair.base)
        ids = [1, 5, 9, 17]
        for text in ("what is 12 + 34 ?", "the answer is 46", "question : 1 + 1 ="):
            ids += tokenizer(text)["input_ids"]
        for sum_ in ("12 + 34 =", "3 + 4 ="):
            ids += tokenizer(f"user : {sum_}\nanswer =")["input_ids"]
        tensors = load_file(pair.base / "model.safetensors")
        hidden = tensors["model.embed_tokens.weight"].double()[ids]
        hidden *= (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        amax = (hidden * tensors[LAYERS[0] + NORM].double()).abs().amax(0)
        weights = torch.cat([tensors[LAYERS[0] + reader] for reader in READERS[NORM]])
        expected = amax**0.7 / weights.double().abs().amax(0) ** 0.3
        assert torch.allclose(profile.smoothing[LAYERS[0] + NORM].double(), expected, rtol=2**-6)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", "there is no prompt"),
            ('{"prompt": "a"}\nno JSON', "line 2: is not valid JSON"),
            ('{"question": "a"}', "line 1: holds no prompt"),
            ("[[1, 2]]", "line 1: holds no prompt"),
            ('{"input_ids": [1, 99999]}', "prompt 1 holds the token 99999"),
            ('{"input_ids": [-1]}', "prompt 1 holds the token -1"),
        ],
    )
    def test_prompts_that_are_none_are_refused(
        self,
        content: str,
        words: str,
        flashrl: Callable[..., Any],
        make_pair: Callable[..., Pair],
        prompts: Path,
    ) -> None:
        pair = make_pair()
        prompts.write_text(content)
        output = prompts.parent / "p.safetensors"
        result = flashrl(
            "profile", "-m", str(pair.base), "--calibrate", str(prompts), "-o", str(output)
        )
        assert result.exit_code == 2
        assert words in result.stderr
        assert not output.exists()

    def test_a_quantized_checkpoint_is_refused(
        self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair], prompts: Path
    ) -> None:
        pair = make_pair()
        result = flashrl(
            *("profile", "-m", str(pair.copy), "--calibrate", str(prompts)),
            *("-o", str(prompts.parent / "p.safetensors")),
        )
        assert result.exit_code == 2
        assert "quantized already" in result.stderr


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "-qm"),
            (["-m", "a", "-o", "p.pt"], "--calibrate"),
            (["-m", "a", "-qm", "b", "--calibrate", "c", "-o", "p.pt"], "--calibrate"),
            (["-m", "a", "-qm", "b", "--alpha", "0.5", "-o", "p.pt"], "--alpha"),
            (["-m", "a", "--calibrate", "c", "--alpha", "1.5", "-o", "p.pt"], "--alpha"),
            (["-qm", "b", "-o", "p.pt"], "-m is needed"),
            (["-m", "a", "-qm", "b"], "-o is needed"),
            (["-m", "a", "-qm", "b", "-o", "p.bin"], "must end in .safetensors"),
            (["-m", "a", "-qm", "b", "-o", "nowhere/p.pt"], "there is no folder nowhere"),
            (["-m", "./a", "-qm", "./b", "-o", "p.pt"], "there is no checkpoint at ./b"),
            (["-m", "a", "-qm", "b", "-o", "p.pt", "--fn", "int4"], "fp8_channel"),
            (["-m", "a", "show", "p.pt"], "has no use before 'show'"),
        ],
    )
    def test_what_is_missing_or_wrong_is_said_before_the_work(
        self,
        arguments: list[str],
        words: str,
        flashrl: Callable[..., Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = flashrl("profile", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_hub_name_offline_is_a_clear_error(
        self, flashrl: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        model, copy = "Qwen/Qwen2.5-32B", "LiyuanLucasLiu/Qwen2.5-32B-quantized.w8a8"
        output = str(tmp_path / "profile.32b.pt")
        result = flashrl("profile", "-m", model, "-qm", copy, "-o", output, "--fn", "int8")
        assert result.exit_code == 2
        assert f"{copy} is no local folder, and could not be had from the hub" in result.stderr
        assert "Offline, download it first" in result.stderr


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TestShowValidateDiff:
    @pytest.fixture
    def made(self, flashrl: Callable[..., Any], make_pair: Callable[..., Pair]) -> Pair:
        pair = make_pair()
        for name in ("p.pt", "p.safetensors"):
            flashrl(
                *("profile", "-m", str(pair.base), "-qm", str(pair.copy)),
                *("-o", str(pair.base.parent / name)),
            )
        return pair

    @pytest.mark.parametrize("name", ["p.pt", "p.safetensors"])
    def test_show_and_validate(self, name: str, flashrl: Callable[..., Any], made: Pair) -> None:
        file = str(made.base.parent / name)
        shown = flashrl("profile", "show", file, "--json").data
        assert shown == {"file": file, **shown}
        assert (shown["num_weights"], shown["num_static_scales"]) == (14, 14)
        # flash-llm-rl fits a factor of about 1 to every up_proj; ours leaves it out.
        assert set(shown["smoothing"]) == set(made.folded)
        for norm, s in made.folded.items():
            assert shown["smoothing"][norm]["smallest"] == pytest.approx(float(s.min()), rel=0.01)
            assert shown["smoothing"][norm]["channels"] == 64
        table = flashrl("profile", "show", file).stdout
        assert LAYERS[1] + NORM in table
        good = flashrl("profile", "--json", "validate", file, "-m", str(made.base))
        assert (good.exit_code, good.data["ok"]) == (0, True)

    def test_validate_says_what_does_not_fit(
        self, flashrl: Callable[..., Any], made: Pair, tmp_path: Path
    ) -> None:
        other = make_checkpoint(tmp_path / "other", intermediate_size=160).path
        file = str(tmp_path / "p.safetensors")
        result = flashrl("profile", "validate", file, "-m", str(other), "--json")
        assert (result.exit_code, result.data["ok"]) == (1, False)
        assert "does not fit the model" in result.data["fault"]
        assert "does not fit the model" in result.stderr

    @pytest.mark.parametrize("command", ["show", "validate"])
    def test_a_malicious_file_is_refused_and_does_nothing(
        self, command: str, flashrl: Callable[..., Any], tmp_path: Path
    ) -> None:
        bad = Malicious(tmp_path / "hacked")
        torch.save({"a.weight": bad}, tmp_path / "zip.pt")
        (tmp_path / "pickle.pt").write_bytes(pickle.dumps(bad))
        (tmp_path / "renamed.safetensors").write_bytes(pickle.dumps(bad))
        for name in ("zip.pt", "pickle.pt", "renamed.safetensors"):
            result = flashrl("profile", command, str(tmp_path / name))
            assert result.exit_code == (1 if command == "validate" else 2)
            assert name in result.stderr
        assert not (tmp_path / "hacked").exists()

    def test_diff_of_the_two_formats_is_none(
        self, flashrl: Callable[..., Any], made: Pair, tmp_path: Path
    ) -> None:
        files = [str(tmp_path / name) for name in ("p.pt", "p.safetensors")]
        result = flashrl("profile", "diff", *files, "--json")
        assert (result.exit_code, result.data["equal"]) == (0, True), result.stdout
        assert flashrl("profile", "diff", *files).stdout == "no difference\n"

    def test_diff_names_what_differs(
        self, flashrl: Callable[..., Any], made: Pair, tmp_path: Path
    ) -> None:
        file = tmp_path / "p.safetensors"
        profile = Profile.load(file)
        norm, other_norm = LAYERS[0] + NORM, LAYERS[1] + NORM
        factors = {**profile.smoothing, norm: profile.smoothing[norm] * 1.5}
        groups = dict(profile.groups)
        del factors[other_norm], groups[other_norm]
        attrs.evolve(profile, smoothing=factors, groups=groups).save(tmp_path / "q.safetensors")
        result = flashrl("profile", "diff", str(file), str(tmp_path / "q.safetensors"), "--json")
        assert result.exit_code == 1
        found = {(d["what"], d["name"]): d for d in result.data["differences"]}
        assert set(found) == {("smoothing", norm), ("smoothing", other_norm)}
        assert found["smoothing", norm]["largest"] == pytest.approx(0.5)
        assert found["smoothing", other_norm]["detail"] == "in the first only"
        near = flashrl(
            *("profile", "diff", str(file), str(tmp_path / "q.safetensors")),
            *("--tolerance", "0.6", "--json"),
        )
        assert [d["name"] for d in near.data["differences"]] == [other_norm]

    @pytest.mark.parametrize("command", ["show", "validate"])
    def test_a_file_that_is_not_there(self, command: str, flashrl: Callable[..., Any]) -> None:
        result = flashrl("profile", command, "./nowhere.pt")
        assert result.exit_code == 2
        assert "there is no file ./nowhere.pt" in result.stderr
