"""What a configuration comes to, and whether all that it names is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashrl.core.profiles import Profile
from flashrl.testing import make_checkpoint

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Write a configuration; its path comes back."""

    def write(text: str) -> str:
        (tmp_path / "a.yaml").write_text(text.replace("$", str(tmp_path)))
        return str(tmp_path / "a.yaml")

    return write


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., None]:
    """Save profiles of one weight."""

    def save(name: str, *, rows: int = 96, **fields: Any) -> None:
        scales = {UP: torch.ones(rows, 1)}
        Profile(**{"scheme": "int8", "scales": scales, **fields}).save(tmp_path / name)

    return save


def test_show_says_what_each_rank_does(
    flashrl: Callable[..., Any], write: Callable[[str], str]
) -> None:
    file = write("configs: [{fn: int8_prune}, {fn: bf16}, {fn: fp8, kv_cache: fp8}]")
    found = flashrl("config", "show", file, "--json").data
    assert found["source"] == file
    schemes = [entry["scheme"] for entry in found["entries"]]
    assert [scheme["quantized"] for scheme in schemes] == [True, False, True]
    assert schemes[0]["prune_dead_neurons"]
    assert (schemes[2]["name"], schemes[2]["kv_cache"]) == ("fp8_channel", "fp8")
    table = flashrl("config", "show", file).stdout
    assert "1, 4, 7, …" in table
    assert "int8_prune" in table


@pytest.mark.parametrize("arguments", [["config"], ["config", "show"], ["config", "validate"]])
def test_without_a_file_it_is_what_is_in_force(
    arguments: list[str], flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = flashrl(*arguments, "--json")
    assert (nothing.exit_code, nothing.data["source"], nothing.data["entries"]) == (0, None, [])
    assert "not set" in flashrl(*arguments).stdout
    monkeypatch.setenv("FLASHRL_CONFIG", "fp8")
    [entry] = flashrl(*arguments, "--json").data["entries"]
    assert entry["scheme"]["name"] == "fp8_channel"


def test_json_before_the_command_is_as_good(flashrl: Callable[..., Any]) -> None:
    assert flashrl("config", "--json", "show", "int8").data["source"] == "int8"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("configs: [{fn: int9}]", "int9"),
        ("configs: [{fn: int8, profle: a.pt}]", "did you mean 'profile'"),
        ("configs: [{model: !!python/object/apply:os.system ['touch $/hacked']}]", "the tag"),
        ("configs: [{fn: int8, profile: $/nowhere.pt}]", "configs[0].profile: there is no file"),
        ("configs: [{fn: bf16}, {profile: a.bin}]", "configs[1].profile: a.bin must end in"),
        ("configs: [{profile: $/bad.pt}]", "it was not loaded"),
        ("configs: [{profile: $/some.safetensors, dynamic: false}]", "of 1 of 2 weights"),
        ("configs: [{fn: fp8, profile: $/whole.safetensors, dynamic: false}]", "not for fp8_chan"),
        ("configs: [{model: $/model, profile: $/narrow.safetensors}]", "does not fit the model"),
    ],
)
def test_validate_finds_what_is_wrong(
    text: str,
    word: str,
    flashrl: Callable[..., Any],
    write: Callable[[str], str],
    save: Callable[..., None],
    tmp_path: Path,
) -> None:
    (tmp_path / "bad.pt").write_bytes(b"no profile")
    save("whole.safetensors")
    save("some.safetensors", weights=[UP, UP.replace("up", "gate")])
    save("narrow.safetensors", rows=32)
    make_checkpoint(tmp_path / "model")
    file = write(text)
    result = flashrl("config", "validate", file, "--json")
    assert result.exit_code == 1
    assert not result.data["ok"]
    [fault] = result.data["faults"]
    assert word in fault
    assert fault in result.stderr
    assert not (tmp_path / "hacked").exists()


def test_validate_is_content_with_what_is_right(
    flashrl: Callable[..., Any],
    write: Callable[[str], str],
    save: Callable[..., None],
    tmp_path: Path,
) -> None:
    save("whole.safetensors")
    make_checkpoint(tmp_path / "model")
    file = write(
        "configs:\n- {model: $/model, profile: $/whole.safetensors, dynamic: false}\n- fn: bf16\n"
    )
    result = flashrl("config", "validate", file, "--json")
    assert (result.exit_code, result.data["ok"], result.data["faults"]) == (0, True, [])


@pytest.mark.parametrize("command", ["show", "validate"])
def test_what_is_neither_scheme_nor_file_is_bad_input(
    command: str, flashrl: Callable[..., Any]
) -> None:
    result = flashrl("config", command, "nowhere.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere.yaml" in result.stderr


def test_show_refuses_what_validate_would(
    flashrl: Callable[..., Any], write: Callable[[str], str]
) -> None:
    result = flashrl("config", "show", write("configs: [{fn: int9}]"))
    assert (result.exit_code, result.stdout) == (2, "")
