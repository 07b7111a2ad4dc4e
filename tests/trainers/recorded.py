"""Runs of a trainer's own command on a CPU, which write down what engine and loss got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

STAND_INS = Path(__file__).parent / "openrlhf" / "cpu"


@attrs.frozen(kw_only=True)
class RecordedRun:
    """What a training run left behind."""

    folder: Path
    log: str

    @classmethod
    def of(cls, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Any:
        """Run Python to its end; what it said is part of the failure if it fails."""
        (folder / "records").mkdir(parents=True)
        log = folder / "log.txt"
        with log.open("w") as output:
            result = subprocess.run(
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                cwd=folder,
                timeout=1200,
            )
        assert result.returncode == 0, log.read_text()[-6000:]
        return cls(folder=folder, log=log.read_text())

    def engines(self) -> list[dict[str, torch.Tensor]]:
        """What the engine held after each sync, byte for byte."""
        return [load_file(path) for path in sorted(self.folder.glob("records/engine-*"))]

    def losses(self) -> list[dict[str, torch.Tensor]]:
        """What the loss got and gave, micro-batch by micro-batch."""
        return [load_file(path) for path in sorted(self.folder.glob("records/loss-*"))]


def make_job(folder: Path, *, num_steps: int, reward: str) -> None:
    """Write a model, prompts for some steps of eight, and ``reward.py``."""
    from flashrl.testing import make_checkpoint

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    make_checkpoint(folder / "model", "qwen2", initializer_range=0.1, **sizes)
    (folder / "prompts").mkdir()
    prompts = [{"prompt": f"what is {i} + {i + 1} ?"} for i in range(8 * num_steps)]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "prompts" / "train.jsonl").write_text(lines)
    (folder / "reward.py").write_text(reward)


def environment(folder: Path, *paths: Path, **variables: str) -> dict[str, str]:
    """What every process of a run sees; FLASHRL_ variables only if given.

    Args:
        folder: Of the run.
        *paths: Where else modules are found.
        **variables: What is this trainer's or this run's own.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHRL_")}
    python_path = (str(STAND_INS), *map(str, paths), os.environ.get("PYTHONPATH", ""))
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "RECORDS": str(folder / "records"),
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile how it draws
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
