"""``flashrl doctor``, with plugins and a GPU that the tests put there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import flashrl as package


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs it in a process of its own, which sees what lies in ``tmp_path``."""

    def run(**environ: str) -> dict[str, Any]:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        found = subprocess.run(
            [sys.executable, "-m", "flashrl.cli", "doctor", "--json"],
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        data: dict[str, Any] = json.loads(found.stdout)
        return data

    return run


def add_plugin(folder: Path, distribution: str, *, entry_points: str, code: str = "") -> None:
    """A distribution as pip would leave it."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / f"{distribution}.py").write_text(code)


def row_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    [row] = [row for row in data["adapters"] if row["name"] == name]
    return dict(row)


def test_versions_are_those_installed(flashrl: Callable[..., Any]) -> None:
    result = flashrl("doctor", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.data["flashrl"] == package.__version__
    assert result.data["python"] == platform.python_version()
    installed = {
        d.metadata["Name"].lower().replace("_", "-"): d.version for d in metadata.distributions()
    }
    for name, version in result.data["distributions"].items():
        assert version == installed.get(name)
    assert result.data["distributions"]["torch"] == metadata.version("torch")


def test_the_embedded_engine_works_here(flashrl: Callable[..., Any]) -> None:
    row = row_of(flashrl("doctor", "--json").data, "huggingface")
    assert row["status"] == "works"
    assert row["versions"]["transformers"] == metadata.version("transformers")
    assert row["distribution"] == f"flashrl {package.__version__}"


def test_broken_plugins_are_kept_with_their_reason(
    tmp_path: Path, doctor: Callable[..., dict[str, Any]]
) -> None:
    add_plugin(
        tmp_path,
        "stranger",
        entry_points="[flashrl.engines]\nabsent = stranger.nowhere:Adapter\n"
        "raising = stranger:Raising\nmissing = stranger:Missing\n"
        "[flashrl.trainers]\nfine = stranger:Fine\n",
        code="from flashrl.core.viability import Viability\n"
        "class Raising:\n"
        "    def check(self): raise RuntimeError('no driver')\n"
        "class Missing:\n"
        "    def check(self): return Viability(ok=False, reason='pip install it')\n"
        "class Fine:\n"
        "    def check(self): return Viability(ok=True, versions={'fine': '2.0'})\n",
    )
    data = doctor()
    absent, raising, missing, fine = (
        row_of(data, name) for name in ("absent", "raising", "missing", "fine")
    )
    assert absent["status"] == "broken"
    assert "stranger.nowhere" in absent["reason"]
    assert (raising["status"], raising["reason"]) == (
        "broken",
        "check() failed: RuntimeError: no driver",
    )
    assert (missing["status"], missing["reason"]) == ("not here", "pip install it")
    assert (fine["status"], fine["versions"]) == ("works", {"fine": "2.0"})
    assert fine["distribution"] == "stranger 1.0"
    assert row_of(data, "huggingface")["status"] == "works"


def test_a_name_claimed_twice_is_shown_with_both_claimants(
    tmp_path: Path, doctor: Callable[..., dict[str, Any]]
) -> None:
    for distribution in ("first", "second"):
        add_plugin(
            tmp_path,
            distribution,
            entry_points=f"[flashrl.trainers]\nsame = {distribution}:Adapter\n",
        )
    [row] = [row for row in doctor()["adapters"] if row["group"] == "flashrl.trainers"]
    assert row["status"] == "broken"
    assert "first 1.0" in row["reason"]
    assert "second 1.0" in row["reason"]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a GPU of that description into this machine."""

    def add(description: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{description}'\necho '{description}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return add


def test_whether_8_bit_pays_is_predicted_for_the_gpu_here(
    gpu: Callable[[str], None], flashrl: Callable[..., Any]
) -> None:
    gpu("NVIDIA A100-SXM4-80GB, 81920, 8.0, 550.54")
    data = flashrl("doctor", "--json").data
    assert [found["memory_gb"] for found in data["gpus"]] == [80.0, 80.0]
    rows = {(row["model"], row["scheme"]): row for row in data["eight_bit"]}
    assert len(rows) == len(data["eight_bit"]) == 4
    assert rows["qwen2.5-7b", "int8"]["rollout_speedup"] > 1.1
    assert rows["qwen2.5-7b", "fp8_channel"]["rollout_speedup"] is None
    assert "no fp8 units" in rows["qwen2.5-7b", "fp8_channel"]["reason"]
    out = flashrl("doctor").stdout
    assert "8 bit here, predicted" in out
    assert "compute capability 8.0" in out


def test_a_gpu_without_a_data_sheet_is_said_to_be_one(
    gpu: Callable[[str], None], flashrl: Callable[..., Any]
) -> None:
    gpu("NVIDIA T4, 15360, 7.5, 550.54")
    [row] = flashrl("doctor", "--json").data["eight_bit"]
    assert "no data sheet of GPU 'NVIDIA T4'" in row["reason"]
    assert "no data sheet" in flashrl("doctor").stdout


def test_without_a_gpu_the_table_says_what_that_means(
    flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = flashrl("doctor").stdout
    for part in (
        "Installed",
        "Adapters",
        "huggingface",
        "works",
        "none: nvidia-smi",
        "8 bit here:",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("instruction", "verdict"),
    [("amx_int8", "has amx_int8"), ("", "no int8 dot products"), (None, "could not be looked at")],
)
def test_the_cpu_is_judged_by_its_instructions(
    instruction: str | None,
    verdict: str,
    flashrl: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("flashrl.cli.doctor.find_cpu_int8", lambda: instruction)
    assert verdict in flashrl("doctor").stdout


def test_what_flashrl_config_comes_to_is_shown(
    flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("configs: [{fn: int8, kv_cache: fp8}, {fn: bf16}]")
    monkeypatch.setenv("FLASHRL_CONFIG", str(file))
    found = flashrl("doctor", "--json").data["environment"]
    assert found["variables"]["FLASHRL_CONFIG"] == str(file)
    assert found["config"] == [{"fn": "int8", "kv_cache": "fp8"}, {"fn": "bf16"}]
    assert "rank 1 of every 2: fn bf16" in flashrl("doctor").stdout


def test_a_broken_flashrl_config_does_not_stop_the_doctor(
    flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHRL_CONFIG", "int9")
    result = flashrl("doctor", "--json")
    assert result.exit_code == 0
    assert "did you mean 'int8'" in result.data["environment"]["config_error"]
    assert "did you mean 'int8'" in flashrl("doctor").stdout
