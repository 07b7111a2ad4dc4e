"""The file that setup writes: what the original's commands ask for, and nothing evaluated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrl.core.config import Config

# The choices of --fn in flash-llm-rl 1.0.3, and the 8-bit type and strategy each one stands for.
ORIGINAL = {
    "fp8": ("float", "channel", False),
    "fp8_fast": ("float", "channel", False),
    "fp8_vllm": ("float", "tensor", False),
    "fp8_vllm_fast": ("float", "tensor", False),
    "fp8_channel": ("float", "channel", False),
    "fp8_tensor": ("float", "tensor", False),
    "int8": ("int", "channel", False),
    "int8_fast": ("int", "channel", False),
    "int8_wo_prune": ("int", "channel", False),
    "int8_prune": ("int", "channel", True),
    "bf16": None,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run, so that their relative paths do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_the_commands_of_the_readme_work_as_written(
    flashrl: Callable[..., Any], folder: Path
) -> None:
    model, file = "LiyuanLucasLiu/Qwen2.5-32B-quantized.w8a8", ".flashrl_config.32b.yaml"
    first = flashrl("setup", "-m", model, "-p", "profile.32b.pt", "--fn", "int8", "-o", file)
    assert first.exit_code == 0
    assert f"export FLASHRL_CONFIG={file}" in first.stdout
    assert "no file profile.32b.pt" in first.stderr
    assert flashrl("setup", "-a", "--fn", "bf16", "-o", file).exit_code == 0
    # Read as flash-llm-rl reads it: no class of ours in between.
    assert yaml.safe_load((folder / file).read_text()) == {
        "configs": [
            {"fn": "int8", "model": model, "profile": "profile.32b.pt"},
            {"fn": "bf16"},
        ]
    }
    assert [path.name for path in folder.iterdir()] == [file]


@pytest.mark.parametrize("fn", ORIGINAL)
def test_every_fn_of_the_original(fn: str, flashrl: Callable[..., Any]) -> None:
    [entry] = flashrl("setup", "--fn", fn, "-o", "a.yaml", "--json").data["entries"]
    scheme = entry["scheme"]
    assert entry["fn"] == fn
    assert scheme["quantized"] == (fn != "bf16")
    if ORIGINAL[fn] is not None:
        found = (scheme["type"], scheme["strategy"], scheme["prune_dead_neurons"])
        assert found == ORIGINAL[fn]


def test_an_unknown_fn_is_bad_usage(flashrl: Callable[..., Any], folder: Path) -> None:
    result = flashrl("setup", "--fn", "int9", "-o", "a.yaml")
    assert result.exit_code == 2
    assert "int8_prune" in result.stderr
    assert list(folder.iterdir()) == []


def test_columns_are_yaml(flashrl: Callable[..., Any]) -> None:
    result = flashrl(
        *("setup", "-p", "profile.pt", "-o", "a.yaml"),
        'distributed_executor_backend="external_launcher"',
        "module_attribute_to_preserve=['workspace']",
        "params_to_ignore=[q_scale]",
        "load_format=auto",
        "dynamic=False",
        "ignore=[lm_head, 're:.*=.*']",
    )
    assert result.exit_code == 0, result.stderr
    [entry] = Config.read("a.yaml").entries
    assert entry.distributed_executor_backend == "external_launcher"
    assert entry.module_attribute_to_preserve == ("workspace",)
    assert entry.params_to_ignore == ("q_scale",)
    assert entry.load_format == "auto"
    assert entry.dynamic is False
    assert entry.ignore == ("lm_head", "re:.*=.*")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("model=__import__('os').system('touch hacked')", "this is Python"),
        ("model=!!python/object/apply:os.system ['touch hacked']", "the tag"),
        ("ignore=('a', 'b')", "this is Python"),
        ("kv_cache=None", "this is Python"),
        ("profle=a.pt", "did you mean 'profile'"),
        ("dynamic=maybe", "must be true or false"),
        ("dynamic", "not of the form key=value"),
        ("fn=int9", "did you mean 'int8'"),
        ("scheme=fp8", "give one of them"),
        ("model=[a", "not valid YAML"),
    ],
)
def test_columns_that_are_wrong_are_refused_and_nothing_runs(
    column: str, words: str, flashrl: Callable[..., Any], folder: Path
) -> None:
    """flash-llm-rl evaluated them."""
    (folder / "a.yaml").write_text("configs:\n- fn: bf16\n")
    result = flashrl("setup", "-o", "a.yaml", column)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert [path.name for path in folder.iterdir()] == ["a.yaml"]
    assert (folder / "a.yaml").read_text() == "configs:\n- fn: bf16\n"


def test_a_profile_has_no_use_with_bf16(flashrl: Callable[..., Any]) -> None:
    result = flashrl("setup", "--fn", "bf16", "-p", "profile.pt", "-o", "a.yaml")
    assert result.exit_code == 2
    assert "quantizes nothing" in result.stderr


def test_a_local_profile_is_found_from_every_folder(
    flashrl: Callable[..., Any], folder: Path
) -> None:
    (folder / "profile.pt").touch()
    flashrl("setup", "-p", "profile.pt", "-o", "a.yaml")
    assert Config.read("a.yaml").entries[0].profile == str(folder / "profile.pt")


def test_what_a_file_loses_is_kept(flashrl: Callable[..., Any], folder: Path) -> None:
    file = folder / "a.yaml"
    file.write_text("# half and half\nconfigs:\n- fn: int8\n")
    before = file.read_bytes()
    result = flashrl("setup", "-a", "--fn", "bf16", "-o", "a.yaml", "--json")
    assert Path(result.data["backup"]).read_bytes() == before  # for the comment
    assert [entry["fn"] for entry in result.data["entries"]] == ["int8", "bf16"]
    again = flashrl("setup", "-a", "--fn", "bf16", "-o", "a.yaml", "--json")
    assert again.data["backup"] is None
    assert len(again.data["entries"]) == 3
    replaced = flashrl("setup", "--fn", "fp8", "-o", "a.yaml", "--json").data
    assert len(Config.read(replaced["backup"]).entries) == 3
    assert len(Config.read("a.yaml").entries) == 1


def test_a_file_of_the_originals_is_appended_to(flashrl: Callable[..., Any], folder: Path) -> None:
    """As flash-llm-rl 1.0.3 writes it for fp8_channel."""
    (folder / "a.yaml").write_text(
        "configs:\n- distributed_executor_backend: external_launcher\n  fn: fp8_channel\n"
        "  load_format: dummy\n  model: m\n  module_attribute_to_preserve:\n  - workspace\n"
    )
    assert flashrl("setup", "-a", "--fn", "bf16", "-o", "a.yaml").exit_code == 0
    first, second = Config.read("a.yaml").entries
    assert (first.scheme, first.load_format, first.model) == ("fp8_channel", "dummy", "m")
    assert second.scheme == "bf16"


@pytest.mark.parametrize("content", ["configs: 3\n", "!!python/name:os.system\n", "\x80"])
def test_nothing_is_appended_to_what_is_no_configuration(
    content: str, flashrl: Callable[..., Any], folder: Path
) -> None:
    (folder / "a.yaml").write_text(content, encoding="latin-1")
    assert flashrl("setup", "-a", "-o", "a.yaml").exit_code == 2
    assert (folder / "a.yaml").read_text(encoding="latin-1") == content


def test_by_default_it_is_in_the_home_folder_and_nothing_else_is_written(
    flashrl: Callable[..., Any], folder: Path
) -> None:
    (folder / "home").mkdir()
    assert flashrl("setup", "--fn", "fp8").exit_code == 0
    assert [path.name for path in (folder / "home").iterdir()] == [".flashrl_config.yaml"]


@pytest.mark.parametrize("output", ["nowhere/a.yaml", "."])
def test_a_file_that_cannot_be_is_a_clear_error(output: str, flashrl: Callable[..., Any]) -> None:
    result = flashrl("setup", "-o", output)
    assert result.exit_code == 2
    assert "folder" in result.stderr
