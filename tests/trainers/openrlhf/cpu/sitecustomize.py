"""A CPU in place of a trainer's GPUs, for every process of a run that has this folder on its path.

Python imports this module when it starts, in Ray's workers too.  Nothing of FlashRL is in it: what
is stood in for is CUDA, NCCL and flash-attn, around the modules of OpenRLHF that need them.  Some
functions of OpenRLHF, TRL and vLLM also write down what goes through them: see recorder.py.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

Change = Callable[[Any], None]
AFTER: dict[str, Change] = {}
"""Module → what happens to it once it is imported."""


def after(name: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        AFTER[name] = change
        return change

    return register


class Finder(importlib.abc.MetaPathFinder):
    """Finds those modules by the other finders, and comes back when they are imported."""

    searching: set[str] = set()  # noqa: RUF012

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in AFTER or fullname in self.searching:
            return None
        self.searching.add(fullname)
        spec = importlib.util.find_spec(fullname)
        self.searching.discard(fullname)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            if fullname == "openrlhf.models.ring_attn_utils":
                with_flash_attn(lambda: execute(module))
            else:
                execute(module)
            AFTER[fullname](module)

        spec.loader.exec_module = exec_module
        return spec


@after("torch.cuda")
def _cuda(cuda: Any) -> None:
    """The current device is the CPU, and there is nothing to wait for."""
    import torch

    cuda.current_device = lambda: torch.device("cpu")
    for name in (
        *("set_device", "synchronize", "empty_cache", "current_stream", "ipc_collect"),
        *("manual_seed", "manual_seed_all", "reset_peak_memory_stats"),
    ):
        setattr(cuda, name, lambda *args, **kwargs: None)


@after("deepspeed.comm.torch")
def _shared_memory(module: Any) -> None:
    """One process trains, so DeepSpeed need not compile how several would communicate."""
    module.build_shm_op = lambda: None


@after("openrlhf.utils.distributed_util")
def _nccl(module: Any) -> None:
    """Weights travel from trainer to engine over TCP."""

    class Communicator:
        def __init__(self, group: Any) -> None:
            self.group = group

        def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
            sent = tensor.detach() if self.group.rank == src else None
            received = self.group.broadcast_obj(sent, src)
            if self.group.rank != src:
                tensor.copy_(received)

    def stateless_init_process_group(
        host: str, port: int, rank: int, world_size: int, device: Any
    ) -> Communicator:
        from vllm.distributed.utils import StatelessProcessGroup

        return Communicator(
            StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        )

    module.stateless_init_process_group = stateless_init_process_group


@after("openrlhf.utils.deepspeed.deepspeed")
def _mesh(module: Any) -> None:
    init_device_mesh = module.init_device_mesh
    module.init_device_mesh = lambda device, *args, **kw: init_device_mesh("cpu", *args, **kw)


@after("openrlhf.trainer.ppo_utils.replay_buffer")
def _replay_buffer(module: Any) -> None:
    """It spells its device cuda:<current device>."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return (lambda *args: torch.device("cpu")) if name == "device" else getattr(torch, name)

    module.torch = Torch()


@after("openrlhf.trainer.ray.vllm_worker_wrap")
def _receiver(module: Any) -> None:
    """It receives weights into memory of a CUDA device; and the test keeps what it received."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCPU(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    update_weight = module.WorkerWrap.update_weight

    def update_weight_on_cpu(
        self: Any, name: str, dtype: torch.dtype, shape: Any, empty_cache: bool = False
    ) -> None:
        with OnCPU():
            update_weight(self, name, dtype, shape, empty_cache)
        if empty_cache:  # the last tensor of a sync
            from recorder import save_engine

            save_engine(self.model_runner.model)

    module.WorkerWrap.update_weight = update_weight_on_cpu


@after("openrlhf.models.loss")
def _record_loss(module: Any) -> None:
    from recorder import recording_loss

    module.PolicyLoss.forward = recording_loss(module.PolicyLoss.forward)


@after("trl.trainer.grpo_trainer")
def _record_trl_loss(module: Any) -> None:
    from recorder import recording_trl_loss

    cls = module.GRPOTrainer
    cls._compute_loss = recording_trl_loss(cls._compute_loss)


@after("trl.generation.vllm_generation")
def _record_trl_sync(module: Any) -> None:
    from recorder import recording_trl_sync

    cls = module.VLLMGeneration
    cls.sync_weights = recording_trl_sync(cls.sync_weights)


@after("vllm.v1.engine.async_llm")
def _drop_log_prob(module: Any) -> None:
    from recorder import DROPPED, dropping_one

    if DROPPED:
        module.AsyncLLM.generate = dropping_one(module.AsyncLLM.generate)


@after("vllm.entrypoints.llm")
def _spoil_log_prob(module: Any) -> None:
    from recorder import DROPPED, spoiling_one

    if DROPPED:
        module.LLM.generate = spoiling_one(module.LLM.generate)


def with_flash_attn(run: Callable[[], None]) -> None:
    """Import a module that wants flash-attn, whose functions it will not call here.

    They are gone again afterwards: transformers and vLLM look for flash-attn, too.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("flash-attn is stood in for, and was called")

    functions = {
        "flash_attn": (),
        "flash_attn.bert_padding": (
            *("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        ),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    for name, attributes in functions.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(dict.fromkeys(attributes, refuse))
        sys.modules[name] = module
    try:
        run()
    finally:
        for name in functions:
            sys.modules.pop(name, None)


AFTER["openrlhf.models.ring_attn_utils"] = lambda module: None
sys.meta_path.insert(0, Finder())
