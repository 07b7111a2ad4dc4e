"""verl's bypass mode: the rollout's log-probabilities are the old ones, so the loss guards them.

verl computes no log-probabilities of its own before the loss there, so only the loss can hold the
rollout against the policy that it trains (verl#4070).  Two places matter: the trainer, which keeps
what cannot be used out of rewards and advantages, and the actor's loss, which masks and measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashrl.core.mismatch import MismatchState, measure
from flashrl.trainers import guards
from flashrl.trainers.metrics import METRICS, PREFIX

__all__ = ["guarded", "is_on", "merged", "reported", "screened"]

_Function = Callable[..., Any]

_MARK = "flashrl_bypass"
"""In the data of a loss, where old log-probabilities are the rollout's."""
_STATE = f"{PREFIX}state"
"""In the metrics of a micro-batch, before they are those of a mini-batch."""
_NUM_UNUSABLE = f"{PREFIX}num_unusable"
# No log-probability is above 0, so the loss knows it for what it is, and it is finite.
_UNUSABLE = 1.0


def is_on(config: Any) -> bool:
    """Whether a trainer's configuration, an OmegaConf tree, asks for bypass mode."""
    section = config.algorithm.get("rollout_correction", None) or {}
    return bool(section.get("bypass_mode", False))


def screened(compute_old_log_prob: _Function) -> _Function:
    """``_compute_old_log_prob`` of a trainer, with unusable tokens out of the way before it."""

    @functools.wraps(compute_old_log_prob)
    def with_screen(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        if is_on(self.config):
            metrics[_NUM_UNUSABLE] = _screen_stored(batch)
        return compute_old_log_prob(self, batch, metrics)

    return with_screen


def _screen_stored(batch: Any) -> int:
    """Screen what verl has stored of a batch; how many tokens were masked out.

    Without two tokens neither advantages nor verl's metrics can be computed (verl#3984).  Then the
    mask stays, and the loss masks them out.
    """
    import transfer_queue as tq
    from tensordict import TensorDict
    from verl.workers.utils.padding import response_to_nested

    where = {"keys": batch.keys, "partition_id": batch.partition_id}
    stored = tq.kv_batch_get(**where, select_fields=["rollout_log_probs", "response_mask"])
    lengths = stored["response_mask"]
    padded = stored.to_padded_tensor()
    asked = padded["response_mask"]
    found = guards.screen(padded["rollout_log_probs"], response_mask=asked)
    if not found.num_unusable:
        return 0
    values, mask = found.rollout_log_probs, found.response_mask
    left_to_the_loss = found.num_tokens - found.num_unusable < 2
    if left_to_the_loss:
        values, mask = values.masked_fill(asked != mask, _UNUSABLE), asked
    fields = {
        "rollout_log_probs": response_to_nested(values, lengths),
        "response_mask": response_to_nested(mask, lengths),
    }
    tq.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch)))
    return 0 if left_to_the_loss else found.num_unusable


def guarded(ppo_loss: _Function) -> _Function:
    """The actor's loss of a micro-batch, with guards and a measurement in bypass mode."""

    @functools.wraps(ppo_loss)
    def with_guards(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

        if not tu.get_non_tensor_data(data, key=_MARK, default=False):
            return ppo_loss(config, model_output, data, dp_group)
        log_probs = no_padding_2_padding(model_output["log_probs"], data).detach()
        padded = data.select("old_log_probs", "response_mask").to_padded_tensor()
        asked = padded["response_mask"]
        found = guards.screen(padded["old_log_probs"], response_mask=asked, old_log_probs=log_probs)
        mask = found.response_mask
        state = measure(
            old_log_probs=log_probs,
            rollout_log_probs=found.rollout_log_probs.masked_fill(asked != mask, torch.nan),
            response_mask=asked,
            on_invalid="mask",
        )
        is_empty = not mask.any()
        data = data.clone(recurse=False)
        lengths = data["response_mask"]
        data["old_log_probs"] = response_to_nested(found.rollout_log_probs, lengths)
        # Some of verl's losses refuse a mask without a token, so that one gets another.
        mask = torch.ones_like(mask) if is_empty else mask
        data["response_mask"] = response_to_nested(mask, lengths)
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
        if is_empty:
            loss, metrics = _nothing(loss, metrics)
        return loss, metrics | {_STATE: state}

    return with_guards


def _nothing(loss: torch.Tensor, metrics: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss of 0 in the same graph, and the same metrics of no token."""
    from verl.utils.metric import Metric

    none = {
        name: Metric(value.aggregation, 0.0)
        for name, value in metrics.items()
        if isinstance(value, Metric)
    }
    return loss.nan_to_num(0.0, 0.0, 0.0) * 0.0, {**metrics, **none}


def merged(postprocess_output: _Function) -> _Function:
    """``_postprocess_output`` of a worker, with one measurement over micro-batches and ranks."""

    @functools.wraps(postprocess_output)
    def with_measurement(self: Any, output: dict[str, Any], **options: Any) -> Any:
        states = output["metrics"].pop(_STATE, None)
        if states:
            state = sum(states, MismatchState.empty(states[0].sums.device))
            group = self.engine.get_data_parallel_group()
            if group is not None:
                state = state.all_reduce(group)
            output["metrics"].update(_measured(state))
        return postprocess_output(self, output, **options)

    return with_measurement


def _measured(state: MismatchState) -> dict[str, Any]:
    """Metrics of a mini-batch, as verl takes them.

    What the correction bounds or drops is PPO's clip in this mode, which verl measures itself.
    """
    from verl.utils.metric import Metric

    found = state.compute()
    values = {PREFIX + name: found[key] for name, key in METRICS.items() if key in found}
    values[_NUM_UNUSABLE] = float(state.sum_of("num_invalid"))
    return {name: Metric("mean", value) for name, value in values.items()}


def reported(update_actor: _Function) -> _Function:
    """``_update_actor`` of a trainer; then what the loss measured has its name in the log.

    verl averages over mini-batches, and the later ones are of a policy that the earlier have moved.
    """

    @functools.wraps(update_actor)
    def with_report(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        if not is_on(self.config):
            return update_actor(self, batch, metrics)
        batch.extra_info[_MARK] = True
        batch = update_actor(self, batch, metrics)
        actor = self.config.actor_rollout_ref.actor
        prefix = "actor/"
        for name in [name for name in metrics if name.startswith(prefix + PREFIX)]:
            value = metrics.pop(name)
            if name == prefix + _NUM_UNUSABLE:
                mini_batch = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
                value = metrics.get(_NUM_UNUSABLE, 0) + round(value * len(batch) / mini_batch)
            metrics[name.removeprefix(prefix)] = value
        return batch

    return with_report
