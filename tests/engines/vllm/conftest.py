"""Real vLLM engines on a CPU; nothing here is collected where vllm is not installed.

One process holds them all: vLLM's process groups are global, so engines can follow each other only
while the earlier ones stay alive.  They are tiny, and those with the same arguments are shared.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrl.testing import Checkpoint, make_checkpoint

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not collect_ignore_glob:
    with warnings.catch_warnings():  # of vLLM and of what it imports
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.model_executor.layers.linear")

SIZES: dict[str, Any] = {
    # Every shard falls on blocks of 128, and vLLM's CPU attention knows heads of 64.
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200]]

_HERE = Path(__file__).parent
_engines: list[Any] = []
_paths: list[tuple[str, ...]] = []
_figures: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mixtures first; warnings of vLLM's own are its own affair, ours stay errors.

    vLLM makes the process group of experts only if the first engine of a process has experts.
    """
    items.sort(key=lambda item: _HERE not in item.path.parents or item.path.stem != "test_moe")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error:::flashrl"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, and a row for each path that weights took: pushes, equal, kept."""
    if _figures:
        terminalreporter.section("log-probs of SmolLM2 in vLLM, against Hugging Face in float32")
        for line in _figures:
            terminalreporter.write_line(line)
    if _paths:
        terminalreporter.section("weights into vLLM")
        for row in _paths:
            terminalreporter.write_line("  ".join(f"{cell:<20}" for cell in row))


def note_figure(line: str) -> None:
    """Add a line to what was measured."""
    _figures.append(line)


def note_path(*cells: str) -> None:
    """Add a row to the table at the end."""
    _paths.append(cells)


def start(model: Path, **arguments: Any) -> Any:
    """Start an engine in this process, and keep it alive."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 64,
        "num_gpu_blocks_override": 256,
        "gpu_memory_utilization": 0.1,
        "seed": 0,
    }
    engine = LLM(str(model), **{**defaults, **arguments})
    _engines.append(engine)
    return engine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Makes a tiny checkpoint: architecture, seed, and changes to its config."""
    made: dict[Any, Checkpoint] = {}

    def checkpoint(architecture: str = "qwen2", seed: int = 0, **config: Any) -> Checkpoint:
        key = (architecture, seed, *sorted(config.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            made[key] = make_checkpoint(folder, architecture, seed=seed, **{**SIZES, **config})
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def engine() -> Callable[..., Any]:
    """Starts an engine, or gives the one that was started with the same arguments."""
    started: dict[Any, Any] = {}

    def engine(model: Path, **arguments: Any) -> Any:
        key = (model, repr(sorted(arguments.items())))
        if key not in started:
            started[key] = start(model, **arguments)
        return started[key]

    return engine


def worker_of(engine: Any) -> Any:
    """VLLM's worker of an engine in this process."""
    workers: list[Any] = []
    engine.collective_rpc(lambda worker: workers.append(worker))
    return getattr(workers[0], "worker", workers[0])


def greedy(engine: Any) -> list[list[int]]:
    """VLLM's own greedy answers, past any cache of earlier weights."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def pytest_unconfigure() -> None:
    """Spare the engines, each of which collects garbage as it ends, a walk through the others."""
    gc.collect()
    gc.freeze()
