"""OpenRLHF's own trainer on a CPU, unchanged: a tiny model, four steps, everything written down."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .. import recorded
from ..recorded import RecordedRun, make_job

NUM_STEPS = 4
REWARD = """
def reward_func(queries, prompts, labels):
    reward = float(sum(map(ord, queries[0])) % 7)
    return {"rewards": reward, "scores": reward, "extra_logs": {}}
"""

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


class Run(RecordedRun):
    """What a training run left behind."""

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
    folder = tmp_path_factory.mktemp("openrlhf")
    make_job(folder, num_steps=NUM_STEPS, reward=REWARD)
    (folder / "site").symlink_to(vllm_site)
    return folder


def environment(folder: Path, job: Path, **variables: str) -> dict[str, str]:
    """What every process of a run sees; FLASHRL_ variables only if given."""
    return recorded.environment(
        folder,
        job / "site",
        DS_ACCELERATOR="cpu",
        CUDA_HOME="/nowhere",  # DeepSpeed asks
        TOKENIZERS_PARALLELISM="false",
        RAY_TMPDIR=tempfile.mkdtemp(prefix="ray-"),  # short, for the names of its sockets
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
        **variables,
    )


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
    return Run.of(["-m", *command, *adapter.launcher.syntax.write(overrides)], folder, environ)


@pytest.fixture(scope="session")
def bf16_run(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``flashrl run`` with a correction that OpenRLHF lacks; rollouts are not quantized."""
    folder = tmp_path_factory.mktemp("bf16")
    options = ["--scheme", "bf16", "--correction", "skyrl_geometric"]
    environ = environment(folder, job, RAY_OVERRIDE_RESOURCES=GPUS)
    return Run.of(["-m", *RUN, *options, "--", *arguments(folder, job)], folder, environ)


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
        return Run.of(["-m", *RUN, *options, "--", *arguments(folder, job)], folder, environ | here)


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
