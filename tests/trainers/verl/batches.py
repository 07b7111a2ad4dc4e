"""verl's configuration as its launcher reads it, and a batch for its own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def configure(*arguments: str) -> Any:
    """verl's configuration with some arguments, as its launcher reads them."""
    import hydra
    import verl.trainer

    folder = Path(verl.trainer.__file__).parent / "config"
    arguments = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *arguments)
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer", overrides=list(arguments))


class Batch:
    """A ragged batch whose ratios spread widely."""

    def __init__(self, seed: int = 0, shape: tuple[int, int] = (6, 9)) -> None:
        torch.manual_seed(seed)
        self.rollout = -3 * torch.rand(shape) - 1
        self.old = self.rollout + 0.5 * torch.randn(shape)
        self.log_probs = (self.old + 0.2 * torch.randn(shape)).requires_grad_()
        self.advantages = torch.randn(shape[0], 1).expand(shape)
        self.lengths = torch.randint(2, shape[1] + 1, (shape[0],))
        self.mask = (torch.arange(shape[1]) < self.lengths.unsqueeze(1)).long()

    def proto(self) -> Any:
        from verl.protocol import DataProto

        tensors = {
            "old_log_probs": self.old,
            "rollout_log_probs": self.rollout,
            "response_mask": self.mask,
        }
        return DataProto.from_dict(tensors={k: v.clone() for k, v in tensors.items()})

    def loss_and_gradient(self, tensors: Any, *, mode: str = "vanilla", actor: Any = None) -> Any:
        """verl's own loss of a corrected batch."""
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.utils.config import omega_conf_to_dataclass

        actor = omega_conf_to_dataclass((actor or configure()).actor_rollout_ref.actor)
        loss, _ = get_policy_loss_fn(mode)(
            old_log_prob=tensors["old_log_probs"],
            log_prob=self.log_probs,
            advantages=self.advantages,
            response_mask=tensors["response_mask"].bool(),
            config=actor,
            rollout_is_weights=tensors.get("rollout_is_weights", None),
        )
        return loss, torch.autograd.grad(loss, self.log_probs)[0]
