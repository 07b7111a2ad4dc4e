"""``flashrl overrides`` and ``flashrl run``: what a trainer's launcher is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

SECTION = "algorithm.rollout_correction"


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that would have replaced this process."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.9.1")
    return calls


def test_overrides_are_what_the_launcher_takes(flashrl: Any) -> None:
    result = flashrl("overrides", "verl", "--scheme", "int8", "--correction", "tis")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"{SECTION}.rollout_is=token" in lines
    assert f"{SECTION}.rollout_is_threshold=2.0" in lines
    assert "actor_rollout_ref.rollout.calculate_log_probs=true" in lines


def test_overrides_as_json_name_the_variable_too(flashrl: Any) -> None:
    data = flashrl("overrides", "verl", "--scheme", "fp8", "--correction", "off", "--json").data
    assert data["scheme"] == "fp8_channel"
    assert data["environment"] == {"FLASHRL_CONFIG": "fp8"}
    assert data["overrides"][f"{SECTION}.rollout_is"] is None
    assert f"{SECTION}.rollout_is=null" in data["arguments"]


def test_the_how_to_shows_what_is_printed(flashrl: Any) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "verl.md"
    command = "flashrl overrides verl --scheme int8 --correction tis"
    shown = page.read_text().split(f"$ {command}\n")[1].split("```")[0]
    assert flashrl(*command.split()[1:]).stdout == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verll"], "did you mean 'verl'?"),
        (["verl", "--correction", "tsi"], "unknown correction 'tsi'; known: tis, icepop"),
        (["verl", "--scheme", "int9"], "int9"),
    ],
)
def test_unknown_names_are_bad_usage(flashrl: Any, arguments: list[str], message: str) -> None:
    result = flashrl("overrides", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout


def test_run_starts_the_launcher_with_what_was_not_given(flashrl: Any, executed: list[Any]) -> None:
    given = ["data.train_files=a.parquet", f"{SECTION}.rollout_is=token", "+extra=1"]
    result = flashrl("run", "verl", "--scheme", "int8", "--", *given)
    ((program, argv, environ),) = executed
    assert program == sys.executable
    assert argv[1:6] == ["-m", "verl.trainer.main_ppo", *given]
    assert f"{SECTION}.rollout_is_threshold=2.0" in argv[6:]
    assert f"{SECTION}.rollout_is=token" not in argv[6:]
    assert environ["FLASHRL_CONFIG"] == "int8"
    assert "appended: " in result.stderr


def test_a_dry_run_prints_one_line_and_starts_nothing(flashrl: Any, executed: list[Any]) -> None:
    long = f"data.train_files={'x' * 300}"
    result = flashrl("run", "verl", "--dry-run", "--", long)
    assert not executed
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"FLASHRL_CONFIG=int8 {sys.executable} -m verl.trainer.main_ppo {long}")
    data = flashrl("run", "verl", "--json", "--", long).data
    assert data["command"][3] == long
    assert data["environment"] == {"FLASHRL_CONFIG": "int8"}


def test_conflicts_are_all_named_and_nothing_starts(flashrl: Any, executed: list[Any]) -> None:
    given = [f"{SECTION}.rollout_is=sequence", f"{SECTION}.bypass_mode=True"]
    result = flashrl("run", "verl", "--correction", "tis", "--", *given)
    assert result.exit_code == 2
    assert "rollout_is is sequence, and token is needed" in result.stderr
    assert "bypass_mode is True, and false is needed" in result.stderr
    assert not executed


def test_the_variable_stands_for_the_scheme_and_the_correction(
    flashrl: Any, executed: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text("configs: [{fn: int8, correction: flashrl_c8}, {fn: bf16}]")
    monkeypatch.setenv("FLASHRL_CONFIG", str(file))
    assert flashrl("run", "verl").exit_code == 0
    assert executed[0][2]["FLASHRL_CONFIG"] == str(file)
    assert f"{SECTION}.rollout_is_threshold=8.0" in executed[0][1]
    assert flashrl("run", "verl", "--correction", "off").exit_code == 0
    assert f"{SECTION}.rollout_is=null" in executed[1][1]
    result = flashrl("run", "verl", "--scheme", "int8")
    assert result.exit_code == 2
    assert "--scheme is int8, and FLASHRL_CONFIG is" in result.stderr


def test_a_trainer_that_is_not_there_is_said_before_anything_starts(
    flashrl: Any, monkeypatch: pytest.MonkeyPatch, executed: list[Any]
) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    result = flashrl("run", "verl")
    assert result.exit_code == 2
    assert "verl is not installed; pip install 'flashrl[verl]'" in result.stderr
    assert not executed
