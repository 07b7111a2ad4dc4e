"""Run by test_worker_processes.py: engines whose model lives in other processes.

    python worker_processes.py llm|async CHECKPOINT_A CHECKPOINT_B

Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import flashrl
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import EngineStateError, WeightUpdateError
from flashrl.session import Session

PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(2,))
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "gpu_memory_utilization": 0.1,
}


def weights(folder: str) -> dict[str, Any]:
    return load_file(Path(folder) / "model.safetensors")


def exercise(session: Session, a: str, b: str) -> dict[str, Any]:
    """Push B, A, B; what was held and said after each, and after a bad push."""
    facts: dict[str, Any] = {"describe": session.describe()}
    facts["shards"] = sorted({i.num_input_shards for i in session.engine.weights().values()})
    facts["answers"] = [session.generate(PROMPTS, GREEDY).response_ids.tolist()]
    facts["equal"] = []
    for folder in (b, a, b):
        session.update_weights(weights(folder).items())
        facts["equal"].append(session.verify(weights(folder).items()).ok)
        facts["answers"].append(session.generate(PROMPTS, GREEDY).response_ids.tolist())
    bad = weights(a)
    bad["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    try:
        session.update_weights(bad.items())
    except WeightUpdateError as error:
        facts["refused"] = sorted(error.faults)
    facts["version_after_refusal"] = session.version
    session.update_weights(weights(a).items())
    facts["equal"].append(session.verify(weights(a).items()).ok)
    return facts


def run_llm(a: str, b: str) -> dict[str, Any]:
    """Two workers that share each layer."""
    from vllm import LLM

    llm = LLM(
        a,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **ARGUMENTS,
        **flashrl.launch_args("vllm", "fp8_tensor"),
    )
    session = flashrl.attach(llm, "fp8_tensor")
    facts = exercise(session, a, b)
    llm.llm_engine.engine_core.shutdown()
    try:
        session.update_weights(weights(a).items())
    except EngineStateError as error:
        facts["after_shutdown"] = str(error)
    return facts


async def run_async(a: str, b: str) -> dict[str, Any]:
    """An AsyncLLM, 16-bit at first, driven from another thread than its event loop."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=a, **ARGUMENTS))
    try:
        session = await asyncio.to_thread(flashrl.attach, engine, "int8")
        facts = await asyncio.to_thread(exercise, session, a, b)
        try:
            session.describe()
        except EngineStateError as error:
            facts["inside_the_loop"] = str(error)
        return facts
    finally:
        engine.shutdown()


if __name__ == "__main__":
    mode, *folders = sys.argv[1:]
    result = run_llm(*folders) if mode == "llm" else asyncio.run(run_async(*folders))
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
