"""Writes down what verl's engines get and hold; spoils one log-probability if asked.

verl imports it by VERL_USE_EXTERNAL_MODULES, in every process.  OBSERVED names a folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from flashrl.trainers.patches import Patches

syncs = 0


def observed() -> Path:
    """The folder of this process's replica."""
    folder = Path(os.environ["OBSERVED"]) / f"replica-{os.environ['VERL_REPLICA_RANK']}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def dump_engine(worker: Any) -> None:
    """Every weight of an engine as it holds it, and the scales of those that have one."""
    global syncs
    model = worker.get_model()
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        scale = getattr(module, "weight_scale", None)
        if scale is not None:
            tensors[f"{name}.weight_scale"] = scale.data
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, observed() / f"sync-{syncs}.safetensors")
    syncs += 1


def after_each_sync(patches: Patches, module: Any) -> None:
    """Dump an engine's weights after each update."""
    cls = module.vLLMColocateWorkerExtension
    update = cls.update_weights_from_ipc

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        dump_engine(self)

    patches.replace(cls, "update_weights_from_ipc", update_weights_from_ipc)


def at_each_bucket(patches: Patches, module: Any) -> None:
    """Note name, type and bytes of each tensor that comes out of verl's buckets."""
    cls = module.BucketedWeightReceiver
    receive = cls.receive_weights

    def receive_weights(self: Any, on_bucket_received: Any) -> None:
        def note(weights: Any, is_last: bool) -> None:
            with (observed() / "received.jsonl").open("a") as file:
                for name, tensor in weights:
                    row = [syncs, name, str(tensor.dtype), tensor.nbytes]
                    file.write(json.dumps(row) + "\n")
            on_bucket_received(weights, is_last)

        receive(self, note)

    patches.replace(cls, "receive_weights", receive_weights)


def spoil_one_token(patches: Patches, module: Any) -> None:
    """Make the first log-probability NaN in the first response after the second sync."""
    cls = module.vLLMHttpServer
    generate = cls.generate
    spoiled: list[str] = []

    async def generate_and_spoil(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await generate(self, *args, **kwargs)
        if self.global_steps == 1 and output.log_probs and not spoiled:
            spoiled.append("once")
            output.log_probs[0] = float("nan")
        return output

    patches.replace(cls, "generate", generate_and_spoil)


changes = {
    "verl.workers.rollout.vllm_rollout.utils": after_each_sync,
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": at_each_bucket,
}
if os.environ.get("SPOIL_ONE_TOKEN"):
    changes["verl.workers.rollout.vllm_rollout.vllm_async_server"] = spoil_one_token
Patches(changes).install()
