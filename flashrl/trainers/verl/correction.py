"""verl's correction of a batch, between guards before it and metrics behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashrl.trainers.guards import Screened, screen
from flashrl.trainers.metrics import PREFIX, measure_correction
from flashrl.trainers.verl.options import OWN_KEY, read_options

__all__ = ["guarded"]

_Correct = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


def guarded(correct: _Correct) -> _Correct:
    """The correction of a batch, with guards, metrics, and the corrections that verl lacks.

    Args:
        correct: verl's ``compute_rollout_correction_and_add_to_batch``.

    Returns:
        The same function of a ``DataProto`` and ``algorithm.rollout_correction``.
    """

    @functools.wraps(correct)
    def with_guards(batch: Any, section: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = batch.batch
        asked = tensors["response_mask"]
        screened = screen(
            tensors["rollout_log_probs"],
            response_mask=asked,
            old_log_probs=tensors["old_log_probs"],
        )
        tensors["rollout_log_probs"] = screened.rollout_log_probs
        tensors["response_mask"] = screened.response_mask
        config = read_options(section)
        weights, metrics = measure_correction(
            old_log_probs=tensors["old_log_probs"],
            rollout_log_probs=screened.rollout_log_probs,
            response_mask=screened.response_mask,
            correction=config,
        )
        metrics[f"{PREFIX}num_unusable"] = screened.num_unusable
        if section.get(OWN_KEY):
            tensors["rollout_is_weights"] = weights.to(torch.float32)
            if config.denominator == "kept":
                tensors["response_mask"] = screened.response_mask * (weights != 0)
        elif not screened.all_unusable:  # verl refuses a batch without a token
            batch, verls = correct(batch, section)
            metrics = {**verls, **metrics}
        _drop_by_weight(batch.batch, asked, screened)
        return batch, metrics

    return with_guards


def _drop_by_weight(tensors: Any, asked: Tensor, screened: Screened) -> None:
    """Give masks back to responses of which nothing is left, with a weight of 0 instead.

    A mean over a mask without a token is NaN (verl#3984), and a mini-batch may consist of such
    responses.  Where verl's own rejection has emptied some of them, and not all, its mask stands.
    """
    mask = tensors["response_mask"]
    had_tokens = (asked != 0).any(dim=-1)
    emptied = had_tokens & (screened.response_mask == 0).all(dim=-1)
    if not (mask != 0).any():
        emptied = had_tokens
    if not emptied.any():
        return
    weights = tensors.get("rollout_is_weights", None)
    if weights is None:
        weights = torch.ones_like(screened.rollout_log_probs, dtype=torch.float32)
    rows = emptied.unsqueeze(-1)
    tensors["rollout_is_weights"] = weights.masked_fill(rows, 0.0)
    tensors["response_mask"] = torch.where(rows, asked, mask)
