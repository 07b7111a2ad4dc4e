"""``flashrl predict``: figures by hand, tables, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QWEN7B = ["predict", "--model", "qwen2.5-7b"]
LINEARS = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944)
EMBEDDINGS = 2 * 152064 * 3584


def test_json_holds_every_preset_with_its_memory(flashrl: Callable[..., Any]) -> None:
    result = flashrl(*QWEN7B, "--gpu", "H200", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = result.data
    assert data["gpu"] == "H200 141GB SXM"
    assert data["model"] == {"name": "qwen2.5-7b", "num_parameters": LINEARS + EMBEDDINGS}
    by_scheme = {row["scheme"]: row for row in data["predictions"]}
    assert list(by_scheme) == ["bf16", "int8", "fp8_channel", "fp8_tensor", "fp8_block"]
    assert by_scheme["bf16"]["weight_bytes"] == 2 * (LINEARS + EMBEDDINGS)
    assert by_scheme["int8"]["memory_saved_bytes"] == LINEARS
    assert by_scheme["bf16"]["rollout_speedup"] == 1
    assert data["unsupported"] == []


def test_options_reach_the_prediction(flashrl: Callable[..., Any]) -> None:
    # vLLM 0.24 on one H200: 32B int8 with an FP8 cache at a context of 6,160 fits 118 sequences
    # and takes 48.1 ms a step.
    result = flashrl(
        *("predict", "--model", "qwen2.5-32b", "--gpu", "h200", "--scheme", "int8", "--json"),
        *("--kv-cache", "fp8", "--batch", "500", "--prompt-length", "6000"),
        *("--response-length", "330", "--memory-utilization", "0.92", "--generation-share", "1"),
    )
    [row] = result.data["predictions"]
    assert row["kv_cache"] == "fp8"
    assert row["num_running"] == pytest.approx(118, rel=0.15)
    assert row["decode_step"]["total"] == pytest.approx(48.1e-3, rel=0.15)
    assert result.data["workload"]["generation_share"] == 1
    parts = {k: v for k, v in row["time"].items() if k != "total"}
    assert sum(parts.values()) == pytest.approx(row["time"]["total"])
    assert row["bound_by"] == max(parts, key=parts.__getitem__)


def test_a_local_configuration_is_read(flashrl: Callable[..., Any], tmp_path: Path) -> None:
    config = {
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = flashrl("predict", "--model", str(tmp_path), "--gpu", "l40s", "--json")
    assert result.data["model"]["num_parameters"] == 2 * (4 * 512**2 + 3 * 512 * 1024) + 512_000


def test_the_table_names_what_is_refused_beside_what_works(flashrl: Callable[..., Any]) -> None:
    result = flashrl(*QWEN7B, "--gpu", "a100")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any("int8" in line and "x" in line and "│" in line for line in lines)
    [refusal] = [line for line in lines if "no fp8 units" in line]
    assert refusal.startswith("fp8_channel, fp8_tensor, fp8_block: ")


def test_cautions_stand_under_the_table(flashrl: Callable[..., Any]) -> None:
    out = flashrl(*QWEN7B, "--gpu", "b200", "--batch", "5000", "--kv-cache", "fp8").stdout
    assert "int8 + fp8 KV" in out
    assert "int8: the int8 rate of the data sheet may not be reached" in out
    assert "of 5000 sequences fit at a time" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "no data sheet of GPU 'tpu'"),
        (["--gpu", "h200", "--scheme", "int9"], "unknown scheme 'int9'"),
        (["--gpu", "h200", "--tp", "3"], "28 attention heads"),
        (["--gpu", "a100", "--scheme", "fp8"], "no fp8 units"),
        (["--gpu", "h200", "--batch", "0"], "--batch"),
        (["--gpu", "h200", "--generation-share", "1.5"], "--generation-share"),
        (["--gpu", "h200", "--model", "/nowhere"], "cannot read a model configuration"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, flashrl: Callable[..., Any]
) -> None:
    result = flashrl(*QWEN7B, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_reason_that_all_schemes_share_is_said_once(flashrl: Callable[..., Any]) -> None:
    assert flashrl(*QWEN7B, "--gpu", "h200", "--tp", "3").stderr.count("28 attention heads") == 1


def test_without_a_gpu_here_it_asks_for_a_name(
    flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = flashrl(*QWEN7B)
    assert result.exit_code == 2
    assert "nvidia-smi is not installed" in result.stderr
    assert "--gpu" in result.stderr


def test_this_machines_gpu_is_the_default_with_its_own_memory(
    flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 40960, 8.0, 550.54'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    data = flashrl(*QWEN7B, "--scheme", "bf16", "--batch", "100000", "--json").data
    assert data["gpu"] == "A100 80GB SXM"
    cache_bytes = 2 * 28 * 4 * 128 * 2 * 2560  # of one sequence of 512 + 2,048 tokens
    free = 40 * 2**30 * 0.9 - 2 * (LINEARS + EMBEDDINGS)
    assert data["predictions"][0]["max_sequences"] == pytest.approx(free / cache_bytes, rel=0.25)
