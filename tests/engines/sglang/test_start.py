"""How an engine becomes 8-bit from its start, and how a start that cannot be followed fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashrl
from flashrl.core.rollouts import SamplingParams
from flashrl.core.schemes import get_scheme
from flashrl.engines.sglang import SGLangAdapter, compat
from flashrl.errors import EngineStateError, SchemeError, UnsupportedError
from flashrl.testing import Checkpoint

from .smoothing import make_profile
from .ways import ARGS, GREEDY, PROMPTS, generate

Checkpoints = tuple[Checkpoint, Checkpoint]


def test_the_environment_makes_a_script_8_bit_that_nobody_edited(
    pool: Any, wide_checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that a file can say: a profile, static scales, layers that are left alone."""
    profile = make_profile(wide_checkpoints[0])
    profile.save(tmp_path / "profile.safetensors")
    config = tmp_path / "rollouts.yaml"
    config.write_text(
        f"configs: [{{fn: int8, profile: {tmp_path}/profile.safetensors, dynamic: false, "
        "ignore: [lm_head, 're:.*down_proj$']}]"
    )
    monkeypatch.setenv("FLASHRL_CONFIG", str(config))
    scheme = get_scheme("int8").evolve(dynamic=False, ignore=("lm_head", "re:.*down_proj$"))
    with pool.running(wide_checkpoints[0].path) as engine:
        assert engine.server_args.quantization == "flashrl"
        session = flashrl.attach(engine, scheme, profile=profile)
        kept = {name for name, info in session.engine.weights().items() if info.scheme is None}
        assert "model.layers.0.mlp.down_proj.weight" in kept
        assert "model.layers.0.mlp.gate_proj.weight" not in kept
        for checkpoint in wide_checkpoints:
            assert session.verify(checkpoint.named_tensors()).ok
            session.update_weights(wide_checkpoints[1].named_tensors())


def test_each_data_parallel_rank_follows_its_own_entry(
    pool: Any, wide_checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hybrid precision: requests go round, and every other one is answered in 16 bit."""
    with pool.borrow(wide_checkpoints[0].path, "qwen2") as engine:
        expected = [generate(engine)]
        with flashrl.attach(engine, "int8"):
            expected.append(generate(engine))
    assert expected[0] != expected[1]
    config = tmp_path / "hybrid.yaml"
    config.write_text("configs: [{fn: int8}, {fn: bf16}]")
    monkeypatch.setenv("FLASHRL_CONFIG", str(config))
    with pool.running(wide_checkpoints[0].path, dp_size=2) as engine:
        answers = [[ask(engine, prompt) for prompt in PROMPTS for _ in range(2)] for _ in range(2)]
    by_rank = [[answer[rank::2] for rank in range(2)] for answer in answers]
    assert sorted(by_rank[0]) == sorted(by_rank[1]) == sorted(expected)


def ask(engine: Any, prompt: list[int]) -> list[int]:
    ids: list[int] = engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
    return ids


def test_any_scheme_travels_in_the_launch_arguments(
    wide_checkpoints: tuple[Checkpoint, Checkpoint],
) -> None:
    scheme = get_scheme("int8").evolve(name="mine", ignore=("lm_head", "model.layers.0"))
    arguments = flashrl.launch_args("sglang", scheme)
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "import json, sys\n"
        "from sglang.srt.configs.model_config import ModelConfig\n"
        "from sglang.srt.layers.quantization import get_quantization_config\n"
        "path, quantization, override = sys.argv[1:]\n"
        "config = ModelConfig(path, quantization=quantization, model_override_args=override)\n"
        "assert config.quantization == 'flashrl', config.quantization\n"
        "found = config.hf_config.quantization_config\n"
        "scheme = get_quantization_config('flashrl').from_config(found).scheme\n"
        "print(scheme.name, *scheme.ignore)\n"
    )
    told = run(code, str(wide_checkpoints[0].path), *arguments.values())
    assert told.returncode == 0, told.stderr[-2000:]
    assert told.stdout.split()[-3:] == ["mine", "lm_head", "model.layers.0"]


def test_a_scheme_that_fits_no_layer_leaves_the_engine_as_it_was(
    pool: Any, wide_checkpoints: tuple[Checkpoint, Checkpoint]
) -> None:
    with pool.borrow(wide_checkpoints[0].path, "qwen2") as engine:
        greedy = {"temperature": 0.0, "max_new_tokens": 8}
        before = engine.generate(input_ids=[[5, 9]], sampling_params=greedy)[0]["output_ids"]
        with pytest.raises(SchemeError, match="fits no layer"):
            flashrl.attach(engine, get_scheme("int8").evolve(targets=("no_such_layer",)))
        with pytest.raises(SchemeError, match=r"qkv_proj.*do not fall on blocks"):
            flashrl.attach(engine, get_scheme("fp8_block").evolve(block_structure=(96, 128)))
        with flashrl.attach(engine, "int8") as session:
            assert session.verify(wide_checkpoints[0].named_tensors()).ok
        after = engine.generate(input_ids=[[5, 9]], sampling_params=greedy)[0]["output_ids"]
        assert before == after


def run(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", code, *arguments, **environ)


def run_python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_flashrl_verify_starts_engines_and_proves_them(wide_checkpoints: Checkpoints) -> None:
    told = run_python(
        *("-m", "flashrl.cli", "verify", "--engine", "sglang", "--scheme", "int8", "--json"),
        *(option for checkpoint in wide_checkpoints for option in ("-m", str(checkpoint.path))),
    )
    assert told.returncode == 0, told.stderr[-2000:]
    checks = json.loads(told.stdout)["checks"]
    assert len(checks) == 9
    assert [check["what"] for check in checks if not check["passed"]] == []


def test_an_engine_that_was_shut_down_is_said_to_be(
    wide_checkpoints: Checkpoints, launched: Any
) -> None:
    """SGLang's own calls would wait for an answer for ever; other engines run on."""
    assert compat.is_alive(launched)
    with flashrl.launch("sglang", wide_checkpoints[0].path, "fp8_channel") as session:
        session.update_weights(wide_checkpoints[1].named_tensors())
        assert session.verify(wide_checkpoints[1].named_tensors()).ok
        engine = session.engine
    for call in (
        lambda: session.update_weights(wide_checkpoints[1].named_tensors()),
        lambda: engine.generate(PROMPTS, SamplingParams()),
        lambda: engine.describe(),
    ):
        with pytest.raises(EngineStateError, match="shut down"):
            call()
    assert session.version is None
    session.detach()
    assert compat.is_alive(launched)
    assert generate(launched)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int9", "FLASHRL_CONFIG='int9' is no scheme"),
        ("{config}", "configs[0]: kv_cache is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_followed_ends_the_start(
    tmp_path: Path, value: str, message: str
) -> None:
    """SGLang logs what a plugin raises and goes on in 16 bit; that would be silent."""
    config = tmp_path / "config.yaml"
    config.write_text("configs: [{fn: int8, kv_cache: fp8}]")
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
    ended = run(code, FLASHRL_CONFIG=value.format(config=config))
    assert ended.returncode != 0
    assert "went on" not in ended.stdout
    assert message in ended.stderr


def test_a_version_without_a_hooks_target_ends_the_start() -> None:
    code = (
        "from flashrl.engines.sglang import compat, plugin\n"
        "compat._PLACES['update from disk'] = (('sglang.srt.gone.Manager.update',), 'AROUND')\n"
        "plugin.register()\n"
        "print('went on')\n"
    )
    ended = run(code, FLASHRL_CONFIG="int8")
    assert ended.returncode == 1
    assert "cannot be followed in SGLang" in ended.stderr
    assert "sglang.srt.gone.Manager.update" in ended.stderr
    without = run(code, FLASHRL_CONFIG="")
    assert "UnsupportedError" in without.stderr
    assert without.returncode != 0


def test_a_scheduler_without_the_plugin_ends_the_start(wide_checkpoints: Checkpoints) -> None:
    """SGLang swallows what a plugin raises; a scheduler without ours would go on in 16 bit."""
    code = (
        "import os, sys\n"
        "import sglang\n"
        "from sglang.srt.plugins import load_plugins\n"
        "if __name__ == '__main__':\n"
        "    load_plugins()\n"
        "    os.environ['SGLANG_PLUGINS'] = 'another'\n"
        f"    sglang.Engine(model_path=sys.argv[1], **{ARGS})\n"
        "    print('went on')\n"
    )
    ended = run(code, str(wide_checkpoints[0].path), FLASHRL_CONFIG="int8")
    assert ended.returncode != 0
    assert "went on" not in ended.stdout
    assert "flashrl" in ended.stderr


def test_registering_twice_is_registering_once() -> None:
    code = (
        "from flashrl.engines.sglang.plugin import register\n"
        "register(); register()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "assert all(len(hooks) == 1 for hooks in HookRegistry._hooks.values())\n"
        "from sglang.srt.layers.quantization import get_quantization_config\n"
        "for name in ('int8', 'fp8_channel', 'fp8_tensor', 'fp8_block'):\n"
        "    assert get_quantization_config(f'flashrl_{name}')().scheme.name == name\n"
    )
    ended = run(code)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_the_adapter_says_what_is_installed() -> None:
    found = SGLangAdapter().check()
    assert found.ok
    assert set(found.versions) == {"sglang"}


def test_presets_have_names_in_sglang() -> None:
    assert flashrl.launch_args("sglang", "fp8") == {"quantization": "flashrl_fp8_channel"}
    assert flashrl.launch_args("sglang", "bf16") == {}


def test_a_quantized_checkpoint_is_refused() -> None:
    from flashrl.engines.sglang.quantization import FlashRLConfig

    with pytest.raises(UnsupportedError, match="quantized already \\(fp8\\)"):
        FlashRLConfig.from_config({"quant_method": "fp8"})
