"""TRL's own GRPO script with its own vLLM on a CPU: a tiny model, and everything written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

STAND_INS = Path(__file__).parents[1] / "openrlhf" / "cpu"
NUM_STEPS = 5
ARGUMENTS = f"""
--use_vllm True --vllm_mode colocate --vllm_max_model_length 64 --vllm_gpu_memory_utilization 0.1
--use_cpu True --bf16 False --gradient_checkpointing False
--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 16
--max_steps {NUM_STEPS} --logging_steps 1 --save_steps 1 --learning_rate 1e-3
--report_to tensorboard --reward_funcs rewards.reward
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL 1.16 uses names that newer transformers deprecate; the rest of it stays an error."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning:transformers"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"))


@attrs.frozen(kw_only=True)
class Run:
    """What a training run left behind."""

    folder: Path
    log: str

    def engines(self) -> list[dict[str, torch.Tensor]]:
        """What vLLM held after each sync, byte for byte; the first is before the first step."""
        return [load_file(path) for path in sorted(self.folder.glob("records/engine-*"))]

    def losses(self) -> list[dict[str, torch.Tensor]]:
        """What the loss got and gave, step by step."""
        return [load_file(path) for path in sorted(self.folder.glob("records/loss-*"))]

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        """The trainer's weights after a step, as it saved them itself; step 0 is the start."""
        name = "../model" if step == 0 else f"trained/checkpoint-{step}"
        return load_file(self.folder / name / "model.safetensors")

    def scalars(self, name: str) -> list[float]:
        """A metric of TRL's log, step by step; empty if it is not there."""
        state = self.folder / f"trained/checkpoint-{NUM_STEPS}/trainer_state.json"
        history = json.loads(state.read_text())["log_history"]
        return [entry[name] for entry in history if name in entry]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, require_packages: Any) -> Path:
    """A folder with a model, prompts and a reward."""
    require_packages("trl", "vllm")
    from flashrl.testing import make_checkpoint

    folder = tmp_path_factory.mktemp("trl")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    make_checkpoint(folder / "model", "qwen2", initializer_range=0.1, **sizes)
    (folder / "prompts").mkdir()
    prompts = [{"prompt": f"what is {i} + {i + 1} ?"} for i in range(8 * NUM_STEPS)]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "prompts" / "train.jsonl").write_text(lines)
    (folder / "rewards.py").write_text(
        "def reward(completions, **_):\n"
        "    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )
    return folder


@pytest.fixture(scope="session")
def train(job: Path, vllm_site: Path) -> Any:
    """Runs a command on the job to its end."""

    def train(name: str, command: Sequence[str], **variables: str) -> Run:
        folder = job / name
        (folder / "records").mkdir(parents=True)
        paths = (str(STAND_INS), str(vllm_site), str(job), os.environ.get("PYTHONPATH", ""))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHRL_")}
        environ = inherited | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RECORDS": str(folder / "records"),
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile the model
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        data = ["--model_name_or_path", str(job / "model")]
        data += ["--dataset_name", str(job / "prompts"), "--output_dir", str(folder / "trained")]
        log = folder / "log.txt"
        with log.open("w") as output:
            result = subprocess.run(
                [sys.executable, *command, *ARGUMENTS, *data],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=folder,
                timeout=1200,
            )
        assert result.returncode == 0, log.read_text()[-6000:]
        return Run(folder=folder, log=log.read_text())

    return train


@pytest.fixture(scope="session")
def int8_run(train: Any) -> Run:
    """TRL's own script and FLASHRL_CONFIG; one log-probability is NaN."""
    command = ["-m", "trl.scripts.grpo"]
    return train("int8", command, FLASHRL_CONFIG="int8", DROP_LOG_PROB="11")


@pytest.fixture(scope="session")
def fp8_run(train: Any) -> Run:
    """The same by ``flashrl run``, with IcePop, which TRL has."""
    options = ["--scheme", "fp8_channel", "--correction", "icepop"]
    return train(
        "fp8", ["-m", "flashrl.cli", "run", "trl", *options, "--", "-m", "trl.scripts.grpo"]
    )


@pytest.fixture(scope="session")
def bf16_run(train: Any) -> Run:
    """A script with a trainer of ours, for a correction that TRL lacks."""
    script = Path(__file__).parent / "train_corrected.py"
    return train(
        "bf16",
        [str(script), "--vllm_importance_sampling_correction", "False"],
        FLASHRL_CONFIG="bf16",
    )
