"""Engines that FlashRL starts itself, and checks at start; each in a process of its own.

They end when they were looked at, and vLLM's process groups with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from flashrl.testing import Checkpoint

START = """
import logging, sys
from vllm import LLM

logging.basicConfig(level=logging.INFO)

if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64,
        num_gpu_blocks_override=64, gpu_memory_utilization=0.1)
    print("STARTED")
"""

BOTH_RANKS = """
import json, os, sys
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    a, b, rank = sys.argv[1:]
    llm = LLM(a, dtype="bfloat16", enforce_eager=True, max_model_len=64,
              num_gpu_blocks_override=64, gpu_memory_utilization=0.1)
    found = []
    llm.collective_rpc(lambda worker: found.append(worker.get_model()))
    found[0].load_weights(iter(load_file(b + "/model.safetensors").items()))
    weight = found[0].model.layers[0].mlp.down_proj.weight
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": [5, 9, 17, 4]}], params, use_tqdm=False)
    print("RESULT", json.dumps({
        "dtype": str(weight.dtype),
        "mode": llm.llm_engine.vllm_config.model_config.logprobs_mode,
        "tokens": list(out[0].outputs[0].token_ids),
    }))
"""


def run(*command: Any, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_verify_starts_engines_one_after_another(checkpoint: Callable[..., Checkpoint]) -> None:
    """Flash-RL#34: and the control, a perturbed tensor, is found and named."""
    models = [checkpoint("qwen2", seed).path for seed in (0, 1)]
    command = ("-m", "flashrl.cli", "verify", "--engine", "vllm", "--json")
    done = run(*command, "-m", models[0], "-m", models[1])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["ok"]
    assert len(found["checks"]) == 9
    assert all(check["passed"] for check in found["checks"])
    assert found["checks"][-1]["detail"] == "found and named"


def test_models_that_the_environment_names_are_pushed_and_verified_at_start(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """FLASHRL_TEST_RELOAD, for a benchmark's score is no proof (Flash-RL#34)."""
    script = tmp_path / "start.py"
    script.write_text(START)
    a, b = (checkpoint("qwen2", seed).path for seed in (0, 1))
    good = {"FLASHRL_CONFIG": "fp8", "FLASHRL_TEST_RELOAD": f"{a},{b}"}
    done = run(script, a, **good)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "STARTED" in done.stdout
    said = done.stdout + done.stderr
    assert said.count("27 tensors equal") == 2, said[-3000:]


def test_a_model_of_another_shape_stops_the_start(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    script, other = tmp_path / "start.py", tmp_path / "other"
    script.write_text(START)
    a = checkpoint("qwen2", 0).path
    other.mkdir()
    tensors = load_file(a / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, other / "model.safetensors")
    done = run(script, a, FLASHRL_CONFIG="int8", FLASHRL_TEST_RELOAD=str(other))
    assert done.returncode != 0
    assert "STARTED" not in done.stdout
    assert "never came: model.norm.weight" in done.stderr


def test_two_data_parallel_ranks_generate_in_two_precisions(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """Rank r uses entry r mod n.

    vLLM runs dense models in data parallel as engines apart ("offline data parallel mode is not
    supported for dense models"), so a trainer starts each with its VLLM_DP_RANK.
    """
    script, config = tmp_path / "rank.py", tmp_path / "config.yaml"
    script.write_text(BOTH_RANKS)
    config.write_text("configs: [{fn: int8}, {fn: bf16}]")
    a, b = (checkpoint("llama", seed).path for seed in (0, 1))
    facts = []
    for rank in (0, 1):
        environ = {"VLLM_DP_RANK": str(rank), "FLASHRL_CONFIG": str(config)}
        done = run(script, a, b, rank, **environ)
        assert done.returncode == 0, done.stderr[-3000:]
        [line] = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        facts.append(json.loads(line.removeprefix("RESULT ")))
    assert [fact["dtype"] for fact in facts] == ["torch.int8", "torch.bfloat16"]
    assert {fact["mode"] for fact in facts} == {"processed_logprobs"}
