"""Engines whose model lives in other processes, each driven by a script of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrl.testing import Checkpoint

SCRIPT = Path(__file__).with_name("worker_processes.py")


def run(mode: str, checkpoint: Callable[..., Checkpoint]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), mode, *(str(checkpoint(seed=s).path) for s in (0, 1))],
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def check_pushes(facts: dict[str, Any]) -> None:
    started, b, a, again = facts["answers"]
    assert facts["equal"] == [True] * 4
    assert started == a
    assert b == again
    assert a != b
    assert facts["refused"] == ["model.layers.1.mlp.down_proj.weight"]
    assert facts["version_after_refusal"] is None


def test_two_workers_that_share_each_layer(checkpoint: Callable[..., Checkpoint]) -> None:
    """One scale a tensor is the whole tensor's, whichever rank holds the row."""
    facts = run("llm", checkpoint)
    check_pushes(facts)
    assert facts["describe"]["workers"] == 2
    assert facts["shards"] == [1, 2]
    assert "shut down" in facts["after_shutdown"]


def test_an_async_engine_is_made_8_bit_while_it_runs(
    checkpoint: Callable[..., Checkpoint],
) -> None:
    facts = run("async", checkpoint)
    check_pushes(facts)
    assert facts["describe"]["quantized_weights"] == 14
    assert "asyncio.to_thread" in facts["inside_the_loop"]
