"""What is added to verl, and where: the one table of everything that is changed in it.

verl's own hooks are an entry point that it loads and registries of trainers, losses and replicas.
None of them sees a batch between rollout and correction in the trainer that a script names, so
these few functions are wrapped, in the process that imports them.  Written for verl 0.9.
"""

from __future__ import annotations

from typing import Any

from flashrl.trainers.patches import Patches, Plugin
from flashrl.trainers.verl import bypass, correction, environment, replica, sender, trainer

__all__ = ["PLUGIN", "install", "uninstall"]


def _carry_environment(patches: Patches, module: Any) -> None:
    """Carry FLASHRL_ variables to every node of Ray's cluster."""
    patches.replace(
        module,
        "get_ppo_ray_runtime_env",
        environment.carrying(module.get_ppo_ray_runtime_env),
    )


def _guard_correction(patches: Patches, module: Any) -> None:
    """Add guards and metrics to the correction, and corrections that verl lacks."""
    name = "compute_rollout_correction_and_add_to_batch"
    patches.replace(module, name, correction.guarded(getattr(module, name)))


def _extend_trainer(patches: Patches, module: Any) -> None:
    """Check the configuration, guard bypass mode, measure the sync."""
    cls = module.PPOTrainer
    patches.replace(cls, "__init__", trainer.prepared(cls.__init__))
    patches.replace(cls, "_init_tokenizer", trainer.with_vocabulary_check(cls._init_tokenizer))
    patches.replace(cls, "_compute_old_log_prob", bypass.screened(cls._compute_old_log_prob))
    patches.replace(cls, "_update_actor", bypass.reported(cls._update_actor))
    patches.replace(cls, "_compute_metrics", trainer.measured(cls._compute_metrics))
    # A trainer that was imported before holds the correction by its name.
    name = "compute_rollout_correction_and_add_to_batch"
    if not hasattr(getattr(module, name), "__wrapped__"):
        patches.replace(module, name, correction.guarded(getattr(module, name)))


def _guard_loss(patches: Patches, module: Any) -> None:
    """Guard and measure bypass mode where the loss is computed."""
    cls = module.TrainingWorker
    patches.replace(module, "ppo_loss", bypass.guarded(module.ppo_loss))
    patches.replace(cls, "_postprocess_output", bypass.merged(cls._postprocess_output))


def _choose_replicas_entry(patches: Patches, module: Any) -> None:
    """Let each replica generate as its entry of FLASHRL_CONFIG says."""
    for name in ("vLLMHttpServer", "SGLangHttpServer"):
        cls = getattr(module, name, None)
        if cls is not None:
            patches.replace(cls, "__init__", replica.configured(cls.__init__))


def _send_quantized(patches: Patches, module: Any) -> None:
    """Send weights in 8 bit where FLASHRL_QUANTIZED_SYNC asks for it."""
    cls = module.ServerAdapter
    patches.replace(cls, "update_weights", sender.quantized(cls.update_weights))


PLUGIN = Plugin(
    {
        "verl.trainer.constants_ppo": _carry_environment,
        "verl.trainer.ppo.rollout_corr_helper": _guard_correction,
        "verl.trainer.ppo.v1.trainer_base": _extend_trainer,
        "verl.workers.engine_workers": _guard_loss,
        "verl.workers.rollout.vllm_rollout.vllm_async_server": _choose_replicas_entry,
        "verl.workers.rollout.sglang_rollout.async_sglang_server": _choose_replicas_entry,
        "verl.workers.rollout.vllm_rollout.vllm_rollout": _send_quantized,
        "verl.workers.rollout.sglang_rollout.sglang_rollout": _send_quantized,
    }
)
install, uninstall = PLUGIN.install, PLUGIN.uninstall
