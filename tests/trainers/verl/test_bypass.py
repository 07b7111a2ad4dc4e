"""Bypass mode: verl's own losses of verl's own micro-batches, guarded and measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from flashrl.trainers import guards

from .batches import Batch, configure

BYPASS = "algorithm.rollout_correction.bypass_mode=True"
LOSSES = {
    "vanilla": [],
    "dppo_tv": ["actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"],
    # This one refuses a micro-batch without a token.
    "bypass_mode": ["actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode"],
}


@pytest.fixture(autouse=True)
def _fresh(require_packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages("verl", "hydra", "transfer_queue")
    monkeypatch.setattr(guards, "_warned", set())


@pytest.fixture(params=list(LOSSES))
def compute_loss(request: pytest.FixtureRequest) -> Any:
    """verl's loss of one micro-batch with its gradient and metrics, as its workers call it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    from flashrl.trainers.verl.bypass import guarded

    config = configure(BYPASS, "actor_rollout_ref.actor.entropy_coeff=0.1", *LOSSES[request.param])
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)

    def compute(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        data, model_output = as_verl_stores_it(batch)
        loss, metrics = guarded(ppo_loss)(actor, model_output=model_output, data=data)
        return loss, torch.autograd.grad(loss, batch.log_probs)[0], metrics

    return compute


def as_verl_stores_it(batch: Batch) -> tuple[Any, dict[str, torch.Tensor]]:
    """A micro-batch without padding, in bypass mode, and what the model says of it."""
    from verl.utils import tensordict_utils as tu

    lengths = batch.lengths.tolist()

    def nested(tensor: torch.Tensor) -> torch.Tensor:
        rows = [row[:length] for row, length in zip(tensor, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts = torch.ones(len(lengths), 1, dtype=torch.int64)
    fields = {
        "prompts": torch.nested.as_nested_tensor(list(prompts), layout=torch.jagged),
        "responses": nested(torch.ones_like(batch.mask)),
        "response_mask": nested(batch.mask),
        "old_log_probs": nested(batch.rollout),
        "advantages": nested(batch.advantages),
    }
    num_tokens = int(batch.lengths.sum())
    shared = {"dp_size": 1, "batch_num_tokens": num_tokens, "global_batch_size": len(lengths)}
    data = tu.get_tensordict(fields, {**shared, "flashrl_bypass": True})
    # One value a token of prompt and response: the last says what would follow.
    log_probs = torch.cat(
        [
            part
            for row, length in zip(batch.log_probs, lengths, strict=True)
            for part in (row[:length], torch.zeros(1))
        ]
    )
    offsets = torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0)
    as_model_says = torch.nested.nested_tensor_from_jagged(log_probs, offsets)
    entropy = torch.nested.nested_tensor_from_jagged(log_probs.square(), offsets)
    return data, {"log_probs": as_model_says, "entropy": entropy}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, 0.7])
def test_an_unusable_token_costs_that_token_only(bad: float, compute_loss: Any) -> None:
    """vime#70: 0.0 where the policy finds the token unlikely is a gap that somebody filled."""
    spoiled, masked = Batch(), Batch()
    least_likely = (spoiled.log_probs * spoiled.mask).argmin()
    spoiled.rollout.view(-1)[least_likely] = bad
    masked.mask.view(-1)[least_likely] = 0
    _, gradient, _ = compute_loss(spoiled)
    torch.testing.assert_close(gradient, compute_loss(masked)[1])
    assert gradient.isfinite().all()
    assert gradient.any()


@pytest.mark.parametrize("how", ["not usable", "masked before"])
def test_a_micro_batch_without_a_usable_token_gives_no_gradient(
    how: str, compute_loss: Any
) -> None:
    """verl#3984: loss 0, gradient 0, finite, and every metric there that other ranks have."""
    batch = Batch()
    _, gradient, metrics = compute_loss(batch)
    assert gradient.any()
    if how == "not usable":
        batch.rollout[:] = math.nan
    else:
        batch.mask[:] = 0
    loss, gradient, metrics_of_none = compute_loss(batch)
    assert loss.item() == 0.0
    assert not gradient.any()
    assert metrics_of_none.keys() == metrics.keys()
    losses = {name: value for name, value in metrics_of_none.items() if "loss" in name}
    assert losses
    assert all(value.aggregate() == 0.0 for value in losses.values())


def test_the_measurement_is_of_the_policy_that_trains(compute_loss: Any) -> None:
    """verl#4070; slime#429: of two micro-batches together as of the whole, in float64 by hand."""
    from flashrl.trainers.verl import bypass

    halves = Batch(seed=1), Batch(seed=2)
    halves[0].rollout[1, 0] = math.nan
    states = [compute_loss(half)[2]["flashrl/state"] for half in halves]
    found = {k: v.aggregate() for k, v in bypass._measured(states[0] + states[1]).items()}
    log_ratios = [half.log_probs.detach() - half.rollout for half in halves]
    counted = [ratio[half.mask == 1] for ratio, half in zip(log_ratios, halves, strict=True)]
    every = torch.cat(counted).double().numpy()
    log_ratio = every[np.isfinite(every)]
    ratio = np.exp(log_ratio)
    assert found["flashrl/num_unusable"] == 1
    assert found["flashrl/kl"] == pytest.approx(np.mean(ratio - 1 - log_ratio), rel=1e-5)
    assert found["flashrl/ess"] == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum())
    assert found["flashrl/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert found["flashrl/ratio_sd"] == pytest.approx(ratio.std(), rel=1e-5)
    assert found["flashrl/ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    p95 = np.percentile(ratio, 95, method="inverted_cdf")
    assert found["flashrl/ratio_p95"] == pytest.approx(p95, rel=5e-3)


def test_other_modes_are_left_alone() -> None:
    from flashrl.trainers.verl.bypass import guarded

    batch = Batch()
    data, model_output = as_verl_stores_it(batch)
    del data["flashrl_bypass"]
    loss = guarded(lambda *arguments: arguments)
    assert loss("config", model_output, data, "group") == ("config", model_output, data, "group")
