"""TRL's own GRPO script with its own vLLM on a CPU: a tiny model, and everything written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..recorded import RecordedRun, environment, make_job

NUM_STEPS = 5
REWARD = """
def reward(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
ARGUMENTS = f"""
--use_vllm True --vllm_mode colocate --vllm_max_model_length 64 --vllm_gpu_memory_utilization 0.1
--use_cpu True --bf16 False --gradient_checkpointing False
--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 16
--max_steps {NUM_STEPS} --logging_steps 1 --save_steps 1 --learning_rate 1e-3
--report_to tensorboard --reward_funcs reward.reward
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL 1.16 uses names that newer transformers deprecate; the rest of it stays an error."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning:transformers"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"))


class Run(RecordedRun):
    """What a training run left behind."""

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
    folder = tmp_path_factory.mktemp("trl")
    make_job(folder, num_steps=NUM_STEPS, reward=REWARD)
    return folder


@pytest.fixture(scope="session")
def train(job: Path, vllm_site: Path) -> Any:
    """Runs a command on the job to its end."""

    def train(name: str, command: Sequence[str], **variables: str) -> Run:
        folder = job / name
        environ = environment(
            folder, vllm_site, job, VLLM_ENABLE_V1_MULTIPROCESSING="0", **variables
        )
        data = ["--model_name_or_path", str(job / "model")]
        data += ["--dataset_name", str(job / "prompts"), "--output_dir", str(folder / "trained")]
        return Run.of([*command, *ARGUMENTS, *data], folder, environ)

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
