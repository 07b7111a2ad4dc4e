"""What is added to OpenRLHF, and where: the one table of everything that is changed in it.

OpenRLHF has no plug-ins.  vLLM has, and calls :func:`register` in the process that generates,
however the trainer was started.  The other processes are ours only if ``python -m
flashrl.trainers.openrlhf`` starts them.

Only plain classes are changed: Ray copies the methods of an actor's class as soon as it is defined.
Written for OpenRLHF 0.11.
"""

from __future__ import annotations

from typing import Any

from flashrl.core.config import load_config
from flashrl.trainers.openrlhf import actor, batch, loss, options, rollouts, transfer
from flashrl.trainers.patches import Patches, Plugin

__all__ = ["PLUGIN", "install", "register", "uninstall"]


def _guard_rollouts(patches: Patches, module: Any) -> None:
    """Make tokens without a log-probability no actions."""
    for name in ("SingleTurnAgentExecutor", "MultiTurnAgentExecutor"):
        cls = getattr(module, name)
        patches.replace(cls, "execute", rollouts.guarded(cls.execute))


def _count_syncs(patches: Patches, module: Any) -> None:
    """Note with each response how many syncs its engine has had."""
    cls = module.AsyncLLM
    patches.replace(cls, "collective_rpc", rollouts.counting_syncs(cls.collective_rpc))


def _guard_batches(patches: Patches, module: Any) -> None:
    """Screen and measure a batch before it is trained on, check the vocabulary."""
    cls = module.RemoteExperienceMaker
    patches.replace(cls, "__init__", batch.with_vocabulary_check(cls.__init__))
    changed = batch.screened_and_measured(cls.make_experience_batch)
    patches.replace(cls, "make_experience_batch", changed)


def _measure_syncs(patches: Patches, module: Any) -> None:
    """Time syncs, send in 8 bit if asked for, and say how old a batch's weights were."""
    cls = module.ActorPPOTrainer
    changed = actor.timed(transfer.sending(cls.broadcast_to_vllm))
    patches.replace(cls, "broadcast_to_vllm", changed)
    patches.replace(cls, "ppo_train", actor.with_sync_metrics(cls.ppo_train))


def _receive_packed(patches: Patches, module: Any) -> None:
    """Take apart weights that were sent in 8 bit."""
    cls = module.WorkerWrap
    patches.replace(cls, "update_weight", transfer.receiving(cls.update_weight))


def _correct_loss(patches: Patches, module: Any) -> None:
    """Put in a correction that OpenRLHF lacks, if one is named."""
    config = options.own_correction()
    if config is not None:
        cls = module.PolicyLoss
        patches.replace(cls, "forward", loss.corrected(cls.forward, config))


PLUGIN = Plugin(
    {
        "openrlhf.utils.agent": _guard_rollouts,
        "vllm.v1.engine.async_llm": _count_syncs,
        "openrlhf.trainer.ppo_utils.experience_maker": _guard_batches,
        "openrlhf.trainer.ray.ppo_actor": _measure_syncs,
        "openrlhf.trainer.ray.vllm_worker_wrap": _receive_packed,
        "openrlhf.models.loss": _correct_loss,
    }
)
install, uninstall = PLUGIN.install, PLUGIN.uninstall


def register() -> None:
    """Called by vLLM in each of its processes; does something where FLASHRL_CONFIG is set."""
    if load_config() is not None:
        install()
