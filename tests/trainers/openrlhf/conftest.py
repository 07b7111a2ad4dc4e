"""OpenRLHF's own trainer on a CPU, unchanged: a tiny model, four steps, everything written down."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

CPU = Path(__file__).parent / "cpu"
NUM_STEPS = 4

# Without this, what is small would not fit a machine without GPUs either.
SMALL = f"""
--actor.num_nodes 1 --actor.num_gpus_per_node 1 --actor.adam.lr 1e-3
--vllm.num_engines 1 --vllm.tensor_parallel_size 1 --vllm.enforce_eager
--vllm.gpu_memory_utilization 0.1
--ds.attn_implementation eager --ds.zero_stage 0
--algo.advantage.estimator reinforce --algo.kl.init_coef 0
--data.input_key prompt --data.max_len 64 --data.max_samples {8 * NUM_STEPS}
--rollout.max_new_tokens 16 --rollout.batch_size 8 --rollout.micro_batch_size 4
--rollout.n_samples_per_prompt 1
--train.batch_size 8 --train.micro_batch_size 4 --train.num_episodes 1
--ckpt.save_steps 1 --ckpt.save_hf --ckpt.disable_ds
""".split()
RUN = ("flashrl.cli", "run", "openrlhf")
GPUS = '{"CPU": 8, "GPU": 2}'


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of OpenRLHF's and DeepSpeed's own are their affair, ours stay errors."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error:::flashrl"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@attrs.frozen(kw_only=True)
class Run:
    """What a training run left behind."""

    folder: Path
    log: str

    def engines(self) -> list[dict[str, torch.Tensor]]:
        """What the engine held after each sync, byte for byte."""
        return [load_file(path) for path in sorted(self.folder.glob("records/engine-*"))]

    def losses(self) -> list[dict[str, torch.Tensor]]:
        """What the loss got and gave, micro-batch by micro-batch."""
        return [load_file(path) for path in sorted(self.folder.glob("records/loss-*"))]

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        """The trainer's weights after a step, counted from 1, as it saved them itself."""
        return load_file(self.folder / f"checkpoints/global_step{step}_hf/model.safetensors")

    def scalars(self, name: str) -> list[float]:
        """A metric of OpenRLHF's TensorBoard log, step by step; empty if it is not there."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (events,) = self.folder.glob("tensorboard/*/events*")
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        if f"train/{name}" not in accumulator.Tags()["scalars"]:
            return []
        return [event.value for event in accumulator.Scalars(f"train/{name}")]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, require_packages: Any, request: Any) -> Path:
    """A folder with a model, prompts and a reward."""
    require_packages("openrlhf", "vllm", "deepspeed")
    vllm_site = request.getfixturevalue("vllm_site")
    from flashrl.testing import make_checkpoint

    folder = tmp_path_factory.mktemp("openrlhf")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    make_checkpoint(folder / "model", "qwen2", initializer_range=0.1, **sizes)
    (folder / "prompts").mkdir()
    prompts = [{"prompt": f"what is {i} + {i + 1} ?"} for i in range(8 * NUM_STEPS)]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "prompts" / "train.jsonl").write_text(lines)
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    reward = float(sum(map(ord, queries[0])) % 7)\n"
        "    return {'rewards': reward, 'scores': reward, 'extra_logs': {}}\n"
    )
    (folder / "site").symlink_to(vllm_site)
    return folder


def environment(folder: Path, job: Path, **variables: str) -> dict[str, str]:
    """What every process of a run sees; FLASHRL_ variables only if given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHRL_")}
    python_path = (str(CPU), str(job / "site"), os.environ.get("PYTHONPATH", ""))
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "RECORDS": str(folder / "records"),
        "DS_ACCELERATOR": "cpu",
        "CUDA_HOME": "/nowhere",  # DeepSpeed asks
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile how it draws
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-"),  # short, for the names of its sockets
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def arguments(folder: Path, job: Path) -> list[str]:
    """OpenRLHF's own arguments of the job."""
    return [
        *SMALL,
        *("--actor.model_name_or_path", str(job / "model")),
        *("--data.prompt_dataset", str(job / "prompts")),
        *("--reward.remote_url", str(job / "reward.py")),
        *("--ckpt.path", str(folder / "checkpoints")),
        *("--ckpt.output_dir", str(folder / "final")),
        *("--logger.tensorboard_dir", str(folder / "tensorboard")),
    ]


def train(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Run:
    """Run a trainer to its end; what it said is part of the failure if it fails."""
    (folder / "records").mkdir()
    log = folder / "log.txt"
    with log.open("w") as output:
        result = subprocess.run(
            [sys.executable, "-m", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=folder,
            timeout=1200,
        )
    assert result.returncode == 0, log.read_text()[-6000:]
    return Run(folder=folder, log=log.read_text())


@pytest.fixture(scope="session")
def int8_run(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """OpenRLHF's own command and FLASHRL_CONFIG; one log-probability is missing."""
    from flashrl.core.schemes import get_scheme
    from flashrl.trainers.openrlhf import OpenRLHFAdapter

    adapter = OpenRLHFAdapter()
    overrides = adapter.overrides(get_scheme("int8"), correction="tis")
    folder = tmp_path_factory.mktemp("int8")
    command = ["openrlhf.cli.train_ppo_ray", *arguments(folder, job)]
    environ = environment(
        folder, job, FLASHRL_CONFIG="int8", DROP_LOG_PROB="11", RAY_OVERRIDE_RESOURCES=GPUS
    )
    return train([*command, *adapter.launcher.syntax.write(overrides)], folder, environ)


@pytest.fixture(scope="session")
def bf16_run(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``flashrl run`` with a correction that OpenRLHF lacks; rollouts are not quantized."""
    folder = tmp_path_factory.mktemp("bf16")
    options = ["--scheme", "bf16", "--correction", "skyrl_geometric"]
    environ = environment(folder, job, RAY_OVERRIDE_RESOURCES=GPUS)
    return train([*RUN, *options, "--", *arguments(folder, job)], folder, environ)


@pytest.fixture(scope="session")
def fp8_run(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``flashrl run`` on a cluster of two nodes, whose daemons know of no variable of ours.

    Weights leave the trainer in 8 bit.
    """
    folder = tmp_path_factory.mktemp("fp8")
    options = ["--scheme", "fp8_channel", "--correction", "icepop"]
    environ = environment(folder, job)
    with two_nodes(environ) as address:
        here = {"RAY_ADDRESS": address, "FLASHRL_QUANTIZED_SYNC": "1"}
        return train([*RUN, *options, "--", *arguments(folder, job)], folder, environ | here)


@contextlib.contextmanager
def two_nodes(environ: Mapping[str, str]) -> Iterator[str]:
    """A cluster of two nodes on this machine, a GPU each; they end with the block."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=4, num_gpus=1, include_dashboard=False)
            yield cluster.address
        finally:
            cluster.shutdown()
