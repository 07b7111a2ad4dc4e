"""In the process that leads the training: guards and metrics of a whole batch.

Between rollout and loss OpenRLHF's trainer holds a batch as a list of experiences, with π's and μ's
log-probabilities of every token.  There it is screened and measured, before it is cut up for the
actors.  What is measured travels on in each response's ``info``, which OpenRLHF averages into its
logs; a value that all responses share comes out as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashrl.trainers import guards
from flashrl.trainers.metrics import measure_correction
from flashrl.trainers.openrlhf.options import read_options
from flashrl.trainers.openrlhf.rollouts import NUM_UNUSABLE

__all__ = ["measure", "screen", "screened_and_measured", "with_vocabulary_check"]

_Method = Callable[..., Any]


def with_vocabulary_check(init: _Method) -> _Method:
    """``__init__`` of the experience maker; holds the model's vocabulary against the tokenizer."""

    @functools.wraps(init)
    def with_check(self: Any, *args: Any, **kwargs: Any) -> None:
        from transformers import AutoConfig

        init(self, *args, **kwargs)
        config = AutoConfig.from_pretrained(
            self.args.actor.model_name_or_path, trust_remote_code=True
        )
        guards.check_vocabulary(
            config.get_text_config().vocab_size, num_tokens=len(self.tokenizer), masked=False
        )

    return with_check


def screened_and_measured(make_experience_batch: _Method) -> _Method:
    """``make_experience_batch`` of the experience maker; then guards, then metrics."""

    @functools.wraps(make_experience_batch)
    def with_guards(self: Any, rollout_samples: Any) -> Any:
        experiences = make_experience_batch(self, rollout_samples)
        if self.args.algo.advantage.is_correction_level != "off":
            num_unusable = screen(experiences)
            metrics = measure(experiences, self.args) | {NUM_UNUSABLE: num_unusable}
            for experience in experiences:
                for name, value in metrics.items():
                    experience.info[name] = torch.full((len(experience.sequences),), value)
        return experiences

    return with_guards


def screen(experiences: Sequence[Any]) -> float:
    """Mask unusable tokens out of experiences, in place.

    Args:
        experiences: OpenRLHF's, with ``action_log_probs`` of the trainer.

    Returns:
        How many tokens those are, with the ones that were cut out where they were generated.

    Raises:
        RolloutError: There are no rollout log-probabilities.
        ShapeError: Their shapes differ from the mask's.
    """
    found = [
        guards.screen(
            experience.rollout_log_probs,
            response_mask=experience.action_mask,
            old_log_probs=experience.action_log_probs,
        )
        for experience in experiences
    ]
    nothing_left = all(screened.num_unusable == screened.num_tokens for screened in found)
    num_unusable = 0.0
    for experience, screened in zip(experiences, found, strict=True):
        cut_out = torch.as_tensor(experience.info.get(NUM_UNUSABLE, 0.0)).sum()
        num_unusable += float(cut_out) + screened.num_unusable
        experience.rollout_log_probs = screened.rollout_log_probs
        if nothing_left:
            # A mean over no token is NaN (verl#3984): all tokens stay, and none has an advantage.
            experience.advantages = torch.zeros_like(experience.advantages)
        else:
            experience.action_mask = screened.response_mask
    return num_unusable


def measure(experiences: Sequence[Any], args: Any) -> dict[str, float]:
    """``flashrl/<name>`` of a batch.

    Args:
        experiences: OpenRLHF's, screened.
        args: OpenRLHF's arguments, which say how it corrects.
    """
    width = max(experience.action_mask.shape[1] for experience in experiences)

    def whole(name: str) -> Tensor:
        parts = [getattr(experience, name) for experience in experiences]
        return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])

    _, metrics = measure_correction(
        old_log_probs=whole("action_log_probs").float(),
        rollout_log_probs=whole("rollout_log_probs").float(),
        response_mask=whole("action_mask"),
        advantages=whole("advantages").float(),
        correction=read_options(args),
    )
    return {name: float(value) for name, value in metrics.items()}
