"""SGLang as verl's engine on a CPU: how verl's process hands it tensors.

verl imports it by VERL_USE_EXTERNAL_MODULES, in every process.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from flashrl.trainers.patches import Patches


def leave_pickling_alone(patches: Patches, module: Any) -> None:
    """SGLang changes how tensors of a GPU are pickled, and takes every tensor for one."""
    patches.replace(module, "monkey_patch_torch_reductions", lambda: None)


def number_replicas(patches: Patches, module: Any) -> None:
    """Say in the environment which replica an engine is, as verl does with vLLM."""
    cls = module.SGLangHttpServer
    init = cls.__init__

    @functools.wraps(init)
    def numbered(self: Any, *args: Any, **kwargs: Any) -> None:
        os.environ["VERL_REPLICA_RANK"] = str(kwargs["replica_rank"])
        init(self, *args, **kwargs)

    patches.replace(cls, "__init__", numbered)


Patches(
    {
        "sglang.srt.utils.patch_torch": leave_pickling_alone,
        "verl.workers.rollout.sglang_rollout.async_sglang_server": number_replicas,
    }
).install()
# A file descriptor goes to a child only, and the engine is none of the trainer's.
torch.multiprocessing.set_sharing_strategy("file_system")
