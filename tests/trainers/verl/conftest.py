"""verl's own trainer on a CPU, unchanged: a tiny model, a few steps, everything written down."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from .jobs import NUM_STEPS, arguments, flashrl_run, make_data, make_model, one_node

SHIMS = Path(__file__).parent / "shims"
SGLANG_STUBS = Path(__file__).parents[2] / "engines" / "sglang" / "stubs"
FUSED = {  # vLLM's layers, and the rows of each of the checkpoint's layers in them
    "qkv_proj": {"q_proj": 128, "k_proj": 64, "v_proj": 64},
    "gate_up_proj": {"gate_proj": 256, "up_proj": 256},
}


@attrs.frozen(kw_only=True)
class Engine:
    """What one replica's engine held after one sync, under the checkpoint's names.

    Args:
        stored: Weights as they are stored, in 8 bit or not.
        scales: Scales of those in 8 bit, [out, 1].
    """

    stored: Mapping[str, torch.Tensor]
    scales: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, file: Path, num_tokens: int) -> Engine:
        stored, scales = {}, {}
        for name, tensor in load_file(file).items():
            for part, rows in unfuse(name, tensor):
                if part.endswith(".weight_scale"):
                    scales[part.removesuffix("_scale")] = rows
                else:  # vLLM pads embeddings
                    is_embedding = "embed" in part or "lm_head" in part
                    stored[part] = rows[:num_tokens] if is_embedding else rows
        return cls(stored=stored, scales=scales)


def unfuse(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors in one of vLLM's."""
    whole = name.split(".")[-2]
    sizes = FUSED.get(whole, {whole: tensor.shape[0]})
    for part, rows in zip(sizes, tensor.split(list(sizes.values())), strict=True):
        yield name.replace(whole, part), rows


@attrs.frozen(kw_only=True)
class Run:
    """What a training run left behind."""

    folder: Path
    log: str
    num_steps: int = NUM_STEPS

    def scalars(self, name: str) -> list[float]:
        """A metric of verl's TensorBoard log, step by step."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (events,) = self.folder.glob("tensorboard/events*")
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        return [event.value for event in accumulator.Scalars(name)]

    def console(self, name: str) -> list[float]:
        """The same metric on verl's console."""
        found = re.findall(rf"step:\d.* - {re.escape(name)}:([-+0-9.e]+)", self.log)
        return [float(value) for value in found]

    def count_in_wandb(self, name: str) -> int:
        """How often a metric stands in the file that W&B would send later.

        That holds the console too, where a colon follows the name.
        """
        (file,) = self.folder.glob("wandb/offline-run-*/run-*.wandb")
        return len(re.findall(re.escape(name).encode() + rb"(?![:\w])", file.read_bytes()))

    def engines(self, replica: int) -> list[Engine]:
        """A replica's engine after each sync."""
        files = sorted((self.folder / "observed" / f"replica-{replica}").glob("sync-*"))
        num_tokens = len(self.trainer_weights(0)["lm_head.weight"])
        return [Engine.read(file, num_tokens) for file in files]

    def received(self, replica: int) -> list[dict[str, tuple[str, int]]]:
        """Type and bytes of each tensor that a replica got, sync by sync."""
        syncs: list[dict[str, tuple[str, int]]] = [{} for _ in range(self.num_steps + 1)]
        file = self.folder / "observed" / f"replica-{replica}" / "received.jsonl"
        for row in map(json.loads, file.read_text().splitlines()):
            sync, name, dtype, num_bytes = row
            syncs[sync][name] = dtype, num_bytes
        return syncs

    def losses(self, step: int) -> list[dict[str, torch.Tensor]]:
        """What verl's loss got in a step: one for each micro-batch of each rank."""
        found = []
        for folder in sorted((self.folder / "observed").glob("rank-*")):
            files = sorted(folder.glob("loss-*"), key=lambda file: int(file.stem.split("-")[1]))
            num_a_step = len(files) // self.num_steps
            found += map(load_file, files[num_a_step * (step - 1) : num_a_step * step])
        return found

    def trainer_weights(self, step: int) -> dict[str, torch.Tensor]:
        """The trainer's weights after a step, as it saved them itself; step 0 is the start."""
        if step == 0:
            return load_file(self.folder / "model" / "model.safetensors")
        saved = self.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        return load_file(saved / "model.safetensors")


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, require_packages: Any) -> Path:
    """A folder with a model, data and a reward."""
    require_packages("verl", "transfer_queue")
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model")
    make_data(folder)
    return folder


@pytest.fixture(scope="session")
def python_path(request: pytest.FixtureRequest, require_packages: Any) -> str:
    """Where verl's processes find a CPU as their platform, and vLLM by its name."""
    require_packages("verl", "vllm")
    return os.pathsep.join(map(str, (request.getfixturevalue("vllm_site"), SHIMS)))


@pytest.fixture(scope="session")
def environ() -> Iterator[dict[str, str]]:
    """The environment of every process of a run, but for what is the run's or the engine's own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHRL_")}
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_folder:
        yield inherited | {
            "RAY_TMPDIR": ray_folder,
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture(scope="session")
def processes(environ: dict[str, str], python_path: str) -> dict[str, str]:
    """The environment of a run with vLLM."""
    return environ | {
        "PYTHONPATH": python_path,
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,observer",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def on_sglang(site: Path) -> dict[str, str]:
    """The environment of a run with SGLang, whose plugins are found by what is installed."""
    info = site / "observer-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: observer\nVersion: 0\n")
    entry_point = "[sglang.srt.plugins]\nobserver = sglang_observer:register\n"
    (info / "entry_points.txt").write_text(entry_point)
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (site, SHIMS, SGLANG_STUBS))),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,sglang_cpu",
        "SGLANG_USE_CPU_ENGINE": "1",
    }


def observed_in(folder: Path) -> dict[str, str]:
    """Where a run writes down what happens."""
    return {"OBSERVED": str(folder / "observed"), "TENSORBOARD_DIR": str(folder / "tensorboard")}


def train(
    command: list[str], folder: Path, environ: Mapping[str, str], num_steps: int = NUM_STEPS
) -> Run:
    """Run a trainer to its end; what it said is part of the failure if it fails."""
    file = folder / "log.txt"
    for _ in range(3):
        with file.open("w") as output:
            result = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                cwd=folder,
                timeout=1500,  # a busy machine takes several times as long as an idle one
            )
        log = file.read_text()
        # Ray gives its own daemon 30 seconds to start, which a busy machine may not have.
        if result.returncode == 0 or "The current node timed out during startup" not in log:
            break
    assert result.returncode == 0, log[-6000:]
    return Run(folder=folder, log=log, num_steps=num_steps)


@pytest.fixture(scope="session")
def int8_run(job: Path, processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``flashrl run verl``, INT8 rollouts, truncated importance sampling, one node, 8-bit sync."""
    folder = tmp_path_factory.mktemp("int8")
    (folder / "model").symlink_to(job / "model")
    command = flashrl_run(*arguments(folder, job), *one_node(1), scheme="int8", correction="tis")
    environ = {**processes, **observed_in(folder), "FLASHRL_QUANTIZED_SYNC": "1"}
    return train(command, folder, environ)


@pytest.fixture(scope="session")
def bypass_run(
    job: Path, processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Bypass mode on two ranks of two micro-batches each; in one step no token is usable."""
    folder = tmp_path_factory.mktemp("bypass")
    (folder / "model").symlink_to(job / "model")
    command = flashrl_run(
        *arguments(folder, job),
        *one_node(2),
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "algorithm.adv_estimator=reinforce_plus_plus",  # whitens advantages, of a token at least
        scheme="int8",
        correction="bypass",
    )
    environ = {**processes, **observed_in(folder), "SPOIL": "batch", "OBSERVE_LOSS": "1"}
    return train(command, folder, environ, num_steps=3)


@pytest.fixture(scope="session")
def sglang_run(
    job: Path,
    environ: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    require_packages: Any,
) -> Run:
    """SGLang: one replica generates in INT8, and gets its weights so, and one in BF16; W&B too."""
    require_packages("sglang")
    folder = tmp_path_factory.mktemp("sglang")
    (folder / "model").symlink_to(job / "model")
    (folder / "hybrid.yaml").write_text("configs:\n- {fn: int8, correction: tis}\n- {fn: bf16}\n")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(folder, job, "sglang")]
    variables = {
        "FLASHRL_CONFIG": "hybrid.yaml",
        "FLASHRL_QUANTIZED_SYNC": "1",
        "WANDB_DIR": str(folder),
        "WANDB_MODE": "offline",
    }
    return train(
        [*command, *one_node(2), "trainer.logger=[console,tensorboard,wandb]"],
        folder,
        {**environ, **observed_in(folder), **on_sglang(folder / "site"), **variables},
    )


@pytest.fixture(scope="session")
def hybrid_run(
    job: Path, processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """An unchanged command and FLASHRL_CONFIG, on a second node of a cluster that lacks it.

    One replica generates in FP8 and one in BF16; the correction is one that verl has not; one
    log-probability of one token is NaN.
    """
    folder = tmp_path_factory.mktemp("hybrid")
    (folder / "model").symlink_to(job / "model")
    (folder / "hybrid.yaml").write_text(
        "configs:\n- {fn: fp8_channel, correction: ais}\n- {fn: bf16}\n"
    )
    environ = {**processes, **observed_in(folder), "SPOIL": "token"}
    with ray_cluster(environ) as address:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(folder, job)]
        command += ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=null"]
        here = {"FLASHRL_CONFIG": "hybrid.yaml", "RAY_ADDRESS": address}
        return train(command, folder, {**environ, **here})


@contextmanager
def ray_cluster(environ: Mapping[str, str]) -> Iterator[str]:
    """Two nodes on this machine; only the second has "GPUs".  Neither knows FLASHRL_CONFIG."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:  # nodes start with this process's environment
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.delenv("FLASHRL_CONFIG", raising=False)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 16, "include_dashboard": False}
        )
        cluster.add_node(num_cpus=16, num_gpus=2)
    try:
        yield str(cluster.address)
    finally:
        cluster.shutdown()
