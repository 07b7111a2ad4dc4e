"""Writes down what verl's engines get and hold; spoils one log-probability if asked.

verl imports it by VERL_USE_EXTERNAL_MODULES, in every process.  OBSERVED names a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from flashrl.trainers.patches import Patches

syncs = 0


def observed() -> Path:
    """The folder of this process's replica."""
    folder = Path(os.environ["OBSERVED"]) / f"replica-{os.environ['VERL_REPLICA_RANK']}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def held_by(model: Any) -> dict[str, Tensor]:
    """Every weight of an engine's model as it holds it, and the scales of those that have one."""
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        scale = getattr(module, "weight_scale", None)
        if scale is not None:
            tensors[f"{name}.weight_scale"] = scale.data
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def dump_engine(model: Any) -> None:
    """Write down what an engine holds after a sync."""
    global syncs
    save_file(held_by(model), observed() / f"sync-{syncs}.safetensors")
    syncs += 1


def note_received(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write down name, type and bytes of what a sync brings."""
    with (observed() / "received.jsonl").open("a") as file:
        for name, tensor in weights:
            file.write(json.dumps([syncs, name, str(tensor.dtype), tensor.nbytes]) + "\n")


def after_each_sync(patches: Patches, module: Any) -> None:
    """Dump an engine's weights after each update."""
    cls = module.vLLMColocateWorkerExtension
    update = cls.update_weights_from_ipc

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        dump_engine(self.get_model())

    patches.replace(cls, "update_weights_from_ipc", update_weights_from_ipc)


def at_each_bucket(patches: Patches, module: Any) -> None:
    """Note name, type and bytes of each tensor that comes out of verl's buckets."""
    cls = module.BucketedWeightReceiver
    receive = cls.receive_weights

    def receive_weights(self: Any, on_bucket_received: Any) -> None:
        def note(weights: Any, is_last: bool) -> None:
            note_received(weights)
            on_bucket_received(weights, is_last)

        receive(self, note)

    patches.replace(cls, "receive_weights", receive_weights)


def spoil(patches: Patches, module: Any) -> None:
    """Make log-probabilities NaN after the second sync: the first of the first response, or all."""
    cls = module.vLLMHttpServer
    generate = cls.generate
    spoiled: list[str] = []

    async def generate_and_spoil(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await generate(self, *args, **kwargs)
        if self.global_steps == 1 and output.log_probs:
            if os.environ["SPOIL"] == "batch":
                output.log_probs[:] = [float("nan")] * len(output.log_probs)
            elif not spoiled:
                output.log_probs[0] = float("nan")
            spoiled.append("once")
        return output

    patches.replace(cls, "generate", generate_and_spoil)


def before_each_loss(patches: Patches, module: Any) -> None:
    """Write down what verl's loss gets, as it is stored."""
    from verl.workers.utils.padding import no_padding_2_padding

    compute = module.ppo_loss
    losses = 0

    def compute_and_note(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        nonlocal losses
        folder = Path(os.environ["OBSERVED"]) / f"rank-{os.environ['RANK']}"
        folder.mkdir(parents=True, exist_ok=True)
        log_probs = no_padding_2_padding(model_output["log_probs"], data).detach()
        tensors = {
            name: data[name].to_padded_tensor(0) for name in ("old_log_probs", "response_mask")
        }
        save_file({"log_probs": log_probs, **tensors}, folder / f"loss-{losses}.safetensors")
        losses += 1
        return compute(config, model_output, data, dp_group)

    patches.replace(module, "ppo_loss", compute_and_note)


changes = {
    "verl.workers.rollout.vllm_rollout.utils": after_each_sync,
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": at_each_bucket,
}
if os.environ.get("SPOIL"):
    changes["verl.workers.rollout.vllm_rollout.vllm_async_server"] = spoil
if os.environ.get("OBSERVE_LOSS"):
    changes["verl.workers.engine_workers"] = before_each_loss
Patches(changes).install()
