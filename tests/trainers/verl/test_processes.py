"""How FlashRL gets into verl's processes, and out again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashrl.core.config import Config, load_config
from flashrl.core.registry import TRAINERS, get_adapter
from flashrl.trainers.verl import VerlAdapter, environment, replica, sender


def run(code: str, *, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHRL_", "VERL_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**inherited, **environ},
        cwd=cwd,
    )
    assert result.returncode == 0, result.stderr
    return result


IS_WRAPPED = """
import verl
import verl.trainer.ppo.v1.trainer_base as base
import verl.trainer.constants_ppo as constants
import verl.trainer.ppo.rollout_corr_helper as helper
import verl.workers.engine_workers as workers
functions = [base.PPOTrainer.__init__, base.PPOTrainer._compute_metrics,
             constants.get_ppo_ray_runtime_env, base.compute_rollout_correction_and_add_to_batch,
             helper.compute_rollout_correction_and_add_to_batch,
             workers.ppo_loss, workers.TrainingWorker._postprocess_output]
print([hasattr(f, '__wrapped__') for f in functions])
"""


@pytest.fixture(autouse=True)
def _verl(require_packages: Any) -> None:
    require_packages("verl", "hydra", "transfer_queue")


def test_verl_is_changed_only_where_the_variable_is_set() -> None:
    assert run(IS_WRAPPED, FLASHRL_CONFIG="int8").stdout.split("\n")[-2] == str([True] * 7)
    assert run(IS_WRAPPED).stdout.split("\n")[-2] == str([False] * 7)


def test_importing_verl_imports_no_trainer_for_us() -> None:
    code = "import sys, verl; print([m for m in sys.modules if m.startswith('verl.trainer')])"
    assert run(code, FLASHRL_CONFIG="int8").stdout.split("\n")[-2] == "[]"


def test_what_was_installed_is_taken_out_again() -> None:
    """Before and after the import, and twice."""
    code = f"""
from flashrl.trainers.verl import VerlAdapter
adapter = VerlAdapter()
{IS_WRAPPED}
adapter.install(); adapter.install()
print([hasattr(f, '__wrapped__') for f in (
    base.PPOTrainer.__init__, base.compute_rollout_correction_and_add_to_batch,
    helper.compute_rollout_correction_and_add_to_batch)])
adapter.uninstall(); adapter.uninstall()
print([hasattr(f, '__wrapped__') for f in (
    base.PPOTrainer.__init__, base.compute_rollout_correction_and_add_to_batch,
    helper.compute_rollout_correction_and_add_to_batch)])
"""
    lines = run(code).stdout.split("\n")
    assert lines[-4:-1] == [str([False] * 7), str([True] * 3), str([False] * 3)]


def test_a_broken_configuration_is_said_and_verl_goes_on() -> None:
    """verl logs at DEBUG what goes wrong in a plug-in."""
    result = run("import verl; print('alive')", FLASHRL_CONFIG="int9")
    assert "alive" in result.stdout
    assert "FlashRL could not be added to verl" in result.stderr
    assert "did you mean 'int8'?" in result.stderr


def test_variables_travel_in_the_jobs_runtime_environment(tmp_path: Path) -> None:
    """verl leaves out what the launching shell has set; Ray's other nodes never saw that shell."""
    (tmp_path / "hybrid.yaml").write_text("configs: [{fn: int8}]")
    code = f"""
import os; os.chdir({str(tmp_path)!r})
import verl
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
variables = get_ppo_ray_runtime_env()['env_vars']
print({{k: v for k, v in variables.items() if k.startswith('FLASHRL')}})
"""
    result = run(code, FLASHRL_CONFIG="hybrid.yaml", FLASHRL_LMHEAD_FP32="1")
    wanted = {"FLASHRL_CONFIG": str(tmp_path / "hybrid.yaml"), "FLASHRL_LMHEAD_FP32": "1"}
    assert result.stdout.split("\n")[-2] == str(wanted)


def test_a_preset_travels_as_it_is() -> None:
    variables = {"FLASHRL_CONFIG": "int8", "FLASHRL_DEBUG": "", "PATH": "/bin"}
    assert environment.carried_variables(variables) == {"FLASHRL_CONFIG": "int8"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_replica_reads_its_entry_at_rank_0(ranks: int, tmp_path: Path) -> None:
    """Rank r of the whole job uses entry r mod n, however ranks fall into replicas."""
    config = Config.from_yaml("configs: [{fn: int8}, {fn: bf16}, {fn: fp8}]")
    file = tmp_path / "hybrid.yaml"
    file.write_text(config.to_yaml())
    for replica_rank in range(4):
        environ = {"FLASHRL_CONFIG": str(file)}
        replica.configure(replica_rank, ranks_per_replica=ranks, environ=environ)
        seen = load_config(environ=environ)
        for rank in range(ranks):
            assert seen.for_rank(rank) == config.for_rank(replica_rank * ranks + rank)
        if environ["FLASHRL_CONFIG"] != str(file):
            Path(environ["FLASHRL_CONFIG"]).unlink()


@pytest.mark.parametrize(
    ("actor", "seen"), [("vllm_server_1_0", "bf16"), ("vllm_server_reward_1_0", None)]
)
def test_engines_of_reward_models_stay_as_they_are(
    actor: str, seen: str | None, tmp_path: Path
) -> None:
    """In a real actor of the name that verl gives; a reward in 8 bit is nobody's wish."""
    code = f"""
import ray
class Server:
    def __init__(self, config, *, replica_rank):
        from flashrl.core.config import load_config
        found = load_config()
        self.scheme = found and found.for_rank(0).scheme
from flashrl.trainers.verl.replica import configured
Server.__init__ = configured(Server.__init__)
Server.get = lambda self: self.scheme
ray.init(address="local", num_cpus=1, include_dashboard=False)
server = ray.remote(Server).options(name={actor!r}).remote(None, replica_rank=1)
print(ray.get(server.get.remote()))
"""
    file = tmp_path / "hybrid.yaml"
    file.write_text("configs: [{fn: int8}, {fn: bf16}]")
    assert run(code, FLASHRL_CONFIG=str(file)).stdout.split("\n")[-2] == str(seen)


def test_one_entry_needs_no_file() -> None:
    environ = {"FLASHRL_CONFIG": "int8"}
    replica.configure(3, environ=environ)
    assert environ == {"FLASHRL_CONFIG": "int8"}
    replica.configure(3, environ={})


def test_the_adapter_is_found_and_can_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = get_adapter(TRAINERS, "verl")
    assert isinstance(adapter, VerlAdapter)
    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    assert adapter.check().ok
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "keeps verl from loading flashrl's guards" in adapter.check().reason
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, flashrl")
    assert adapter.check().ok


SCREEN_IN_BYPASS_MODE = """
import hydra, ray, torch, verl.trainer
import transfer_queue as tq
from pathlib import Path
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from flashrl.trainers.verl.bypass import screened

class Trainer:
    folder = str(Path(verl.trainer.__file__).parent / "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        config = hydra.compose("ppo_trainer", overrides=[
            "algorithm.rollout_correction.bypass_mode=true",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"])

def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

nan = float("nan")
ray.init(address="local", num_cpus=4, include_dashboard=False)
tq.init(Trainer.config.transfer_queue)
for rows in ([-1.0, nan, -2.0], [-0.5, -0.25]), ([nan, nan, nan], [nan, -0.25]):
    where = {"keys": ["a", "b"], "partition_id": "train"}
    fields = {"rollout_log_probs": nested(*rows), "response_mask": nested([1, 1, 1], [1, 1])}
    tq.kv_batch_put(**where, fields=TensorDict(fields, batch_size=2))
    metrics = {}
    compute_old_log_prob = screened(lambda self, batch, metrics: batch)
    compute_old_log_prob(Trainer(), KVBatchMeta(**where, tags=[{}, {}]), metrics)
    stored = tq.kv_batch_get(**where, select_fields=list(fields))
    print(metrics, *([row.tolist() for row in stored[name].unbind()] for name in fields))
tq.close()
"""


def test_in_bypass_mode_what_verl_has_stored_is_screened() -> None:
    """There the rollout's log-probabilities become the old ones before anything looks at them.

    With one token left verl could whiten nothing: then the mask stays for the loss to clear, and
    what is stored is finite.
    """
    lines = run(SCREEN_IN_BYPASS_MODE).stdout.splitlines()
    one = {"flashrl/num_unusable": 1}
    assert f"{one} [[-1.0, 0.0, -2.0], [-0.5, -0.25]] [[1, 0, 1], [1, 1]]" in lines
    none = {"flashrl/num_unusable": 0}
    assert f"{none} [[1.0, 1.0, 1.0], [1.0, -0.25]] [[1, 1, 1], [1, 1]]" in lines


SEND_AND_RECEIVE = """
import asyncio, threading, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from flashrl.core.updates.quantized import quantize_tensors
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
    BucketedWeightReceiver, BucketedWeightSender)
folder, handle, received = Path("."), "ipc://" + str(Path("weights.sock").absolute()), {}
def receive():
    def take(weights, is_last):
        received.update((name, tensor.clone()) for name, tensor in weights)
    BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(take)
thread = threading.Thread(target=receive)
thread.start()
weights = load_file("weights.safetensors").items()
sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
asyncio.run(sender.async_send_weights(quantize_tensors(weights, "int8")))
thread.join()
save_file(received, "received.safetensors")
"""


def test_quantized_weights_pass_verls_own_buckets_bit_for_bit(
    tmp_path: Path, python_path: str
) -> None:
    """Values and scales of different alignment, in buckets that part them."""
    torch.manual_seed(0)
    weights = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(401, 999) for n in range(5)}
    weights["model.norm.weight"] = torch.randn(7).bfloat16()
    save_file(weights, tmp_path / "weights.safetensors")
    variables = {"PYTHONPATH": python_path, "VERL_USE_EXTERNAL_MODULES": "cpu_platform"}
    run(SEND_AND_RECEIVE, cwd=tmp_path, **variables)
    received = load_file(tmp_path / "received.safetensors")
    assert torch.equal(received.pop("model.norm.weight"), weights.pop("model.norm.weight"))
    for name, weight in weights.items():
        scale = weight.abs().amax(1, keepdim=True) / torch.tensor(127.0)
        assert torch.equal(received.pop(f"{name}_scale"), scale)
        assert torch.equal(received.pop(name), (weight / scale).round().to(torch.int8))
    assert not received


@pytest.mark.parametrize(
    ("entries", "options", "wanted"),
    [
        ("{fn: int8}", {}, "int8"),
        ("{fn: bf16}", {}, None),
        ("{fn: int8}", {"tensor_parallel": 2}, None),
        ("{fn: int8, profile: p.safetensors}", {}, None),
        ("{fn: bf16}, {fn: fp8}", {"replica_rank": 1}, "fp8_channel"),
        ("{fn: bf16}, {fn: fp8}", {"ranks_per_replica": 2}, None),
        ("{fn: bf16}, {fn: fp8}", {"ranks_per_replica": 4, "replica_rank": 1}, None),
    ],
)
def test_weights_leave_in_8_bit_only_where_the_engine_would_make_the_same(
    entries: str, options: dict[str, int], wanted: str | None
) -> None:
    config = Config.from_yaml(f"configs: [{entries}]")
    scheme = sender.scheme_of_replica(config, **{"replica_rank": 0, **options})
    assert (scheme and scheme.name) == wanted


def test_warnings_are_heard_though_vllms_server_silences_the_root_logger() -> None:
    code = """
import logging, verl
logging.getLogger().setLevel(logging.ERROR)
from flashrl.trainers.guards import warn_once
warn_once("anything", "heard")
from flashrl.trainers.verl import VerlAdapter
VerlAdapter().uninstall()
warn_once("another thing", "not ours to say any more")
"""
    result = run(code, FLASHRL_CONFIG="int8")
    assert "WARNING flashrl.trainers.guards: heard" in result.stderr
    assert "not ours" not in result.stderr
    told = run(
        "import verl.trainer.constants_ppo", FLASHRL_CONFIG="int8", FLASHRL_LOGGING_LEVEL="INFO"
    )
    assert "constants_ppo is changed: Carry FLASHRL_ variables" in told.stderr
