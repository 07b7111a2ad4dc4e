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

SHIMS = Path(__file__).parent / "shims"
NUM_STEPS = 4

# What a machine without GPUs needs; nothing of it is FlashRL's.
CPU = """
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False
+actor_rollout_ref.rollout.enable_sleep_mode=False
+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=NONE
actor_rollout_ref.rollout.gpu_memory_utilization=0.1
trainer.device=cpu
""".split()  # noqa: SIM905
# A job that is small.
SMALL = f"""
algorithm.adv_estimator=grpo
data.train_batch_size=4
data.max_prompt_length=64
data.max_response_length=16
data.dataloader_num_workers=0
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.max_model_len=128
actor_rollout_ref.rollout.max_num_seqs=8
actor_rollout_ref.rollout.max_num_batched_tokens=256
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
actor_rollout_ref.rollout.agent.num_workers=1
reward.custom_reward_function.name=compute_score
reward.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.nnodes=1
trainer.total_training_steps={NUM_STEPS}
trainer.total_epochs=1
trainer.val_before_train=False
trainer.test_freq=-1
trainer.save_freq=1
trainer.logger=[console,tensorboard]
""".split()


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

    def trainer_weights(self, step: int) -> dict[str, torch.Tensor]:
        """The trainer's weights after a step, as it saved them itself; step 0 is the start."""
        if step == 0:
            return load_file(self.folder / "model" / "model.safetensors")
        saved = self.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        return load_file(saved / "model.safetensors")


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, require_packages: Any) -> Path:
    """A folder with a model, data and a reward."""
    require_packages("verl", "vllm", "transfer_queue")
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
def processes(python_path: str) -> Iterator[dict[str, str]]:
    """The environment of every process of a run, but for what is the run's own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHRL_")}
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_folder:
        yield inherited | {
            "PYTHONPATH": python_path,
            "RAY_TMPDIR": ray_folder,
            "VERL_USE_EXTERNAL_MODULES": "cpu_platform,observer",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "OMP_NUM_THREADS": "1",
        }


def make_model(folder: Path) -> None:
    """Two layers with random BF16 weights, and as many logits as the tokenizer has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_data(folder: Path) -> None:
    import pandas

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 8 * a + b},
        }
        for a in range(4)
        for b in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    return sum(c.isalpha() for c in solution_str) / 10\n"
    )


def observed_in(folder: Path) -> dict[str, str]:
    """Where a run writes down what happens."""
    return {"OBSERVED": str(folder / "observed"), "TENSORBOARD_DIR": str(folder / "tensorboard")}


def arguments(folder: Path, job: Path) -> list[str]:
    """verl's own arguments of the job."""
    return [
        *SMALL,
        *CPU,
        f"data.train_files={job / 'train.parquet'}",
        f"data.val_files={job / 'train.parquet'}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"reward.custom_reward_function.path={job / 'reward.py'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]


def train(command: list[str], folder: Path, environ: Mapping[str, str]) -> Run:
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
    return Run(folder=folder, log=log)


@pytest.fixture(scope="session")
def int8_run(job: Path, processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``flashrl run verl``, INT8 rollouts, truncated importance sampling, one node, 8-bit sync."""
    folder = tmp_path_factory.mktemp("int8")
    (folder / "model").symlink_to(job / "model")
    local = [
        "trainer.n_gpus_per_node=1",
        "+ray_kwargs.ray_init.address=local",  # and not what else runs here
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]
    command = [sys.executable, "-m", "flashrl.cli", "run", "verl", "--scheme", "int8"]
    command += ["--correction", "tis", "--", *arguments(folder, job), *local]
    environ = {**processes, **observed_in(folder), "FLASHRL_QUANTIZED_SYNC": "1"}
    return train(command, folder, environ)


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
    environ = {**processes, **observed_in(folder), "SPOIL_ONE_TOKEN": "1"}
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
