"""Corrected losses and their gradients against closed forms in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.correction import CorrectionConfig, compute, get_config
from flashrl.core.correction.losses import AGGREGATIONS, aggregate, policy_loss
from flashrl.errors import ConfigError, ShapeError, UnknownNameError

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


class Batch:
    """A ragged batch with a current policy that has moved since the sync."""

    def __init__(self, batch=6, length=11, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def noise():
            return torch.randn(batch, length, generator=generator, dtype=torch.float64)

        self.rollout = -3 * torch.rand(batch, length, generator=generator, dtype=torch.float64) - 2
        self.old = self.rollout + 0.5 * noise()
        self.log_probs = (self.old + 0.3 * noise()).requires_grad_()
        self.advantages = noise()
        lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
        self.mask = (torch.arange(length) < lengths).double()

    def weights(self, config):
        return compute(
            old_log_probs=self.old,
            log_probs=self.log_probs,
            rollout_log_probs=self.rollout,
            response_mask=self.mask,
            advantages=self.advantages,
            config=config,
        ).weights

    def loss(self, config="default", weights=None, **options):
        return policy_loss(
            self.log_probs,
            advantages=self.advantages,
            response_mask=self.mask,
            weights=self.weights(config) if weights is None else weights,
            old_log_probs=self.old,
            rollout_log_probs=self.rollout,
            config=config,
            **(CLIP | options),
        )


def naive_loss(batch, config, weights, aggregation):
    """The definitions, a token at a time, and the derivative by each log-probability."""
    config = get_config(config)
    response = batch.mask != 0
    counted = response if config.denominator == "fixed" else response & (weights != 0)
    lengths = counted.sum(-1)
    num_sequences = int((lengths > 0).sum())
    loss, gradient = 0.0, torch.zeros_like(batch.old)
    for row, column in response.nonzero().tolist():
        advantage, weight = float(batch.advantages[row, column]), float(weights[row, column])
        log_prob = batch.log_probs[row, column].item()
        reference = batch.old if config.objective == "decoupled" else batch.rollout
        ratio = math.exp(log_prob - float(reference[row, column]))
        clipped = min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
        if config.objective == "policy_gradient":
            surrogate, slope = advantage * log_prob, advantage
        elif ratio * advantage <= clipped * advantage:
            surrogate, slope = ratio * advantage, ratio * advantage
        else:
            surrogate, slope = clipped * advantage, 0.0
        share = {
            "token_mean": 1 / max(1, int(lengths.sum())),
            "seq_mean_token_sum": 1 / max(1, num_sequences),
            "seq_mean_token_mean": 1 / max(1, num_sequences) / max(1, int(lengths[row])),
        }[aggregation]
        loss -= share * weight * surrogate
        gradient[row, column] = -share * weight * slope
    return loss, gradient


CONFIGS = [
    CorrectionConfig(high=1.2),
    CorrectionConfig(bound="mask", low=0.8, high=1.5, denominator="kept"),
    CorrectionConfig(level="sequence", bound="mask", high=3.0, denominator="kept"),
    CorrectionConfig(objective="bypass", level="none", veto_floor=0.4),
    CorrectionConfig(objective="policy_gradient", high=1.2, tv_delta=0.05),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.objective)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_gradient_are_the_analytic_ones(config, aggregation, seed):
    """slime#179: the weight carries no gradient, so the gradient is w times the uncorrected one."""
    batch = Batch(seed=seed)
    weights = batch.weights(config)
    loss = batch.loss(config, aggregation=aggregation)
    loss.backward()
    expected, gradient = naive_loss(batch, config, weights, aggregation)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(batch.log_probs.grad, gradient)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", ["fixed", "kept"])
def test_all_rejected_is_loss_zero_and_gradient_zero(aggregation, denominator):
    """verl#3984: all tokens rejected: loss 0, gradient 0, finite."""
    batch = Batch()
    config = CorrectionConfig(bound="mask", low=1e6, high=1e7, denominator=denominator)
    loss = batch.loss(config, aggregation=aggregation)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(batch.log_probs.grad, torch.zeros_like(batch.old))


def test_no_response_token_is_loss_zero_too():
    batch = Batch()
    batch.mask.zero_()
    loss = batch.loss()
    loss.backward()
    assert loss.item() == 0.0
    assert not batch.log_probs.grad.any()


def test_one_loss_a_sequence_against_weights_a_token_is_an_error():
    """verl#3245: a (B,) loss against a (B, T) weight with B = T would broadcast silently."""
    square = torch.ones(4, 4)
    with pytest.raises(ShapeError, match=r"losses has shape \(4,\), response_mask \(4, 4\)"):
        aggregate(torch.ones(4), response_mask=square, weights=square)
    with pytest.raises(ShapeError, match=r"weights has shape \(4, 1\)"):
        aggregate(square, response_mask=square, weights=torch.ones(4, 1))
    with pytest.raises(ShapeError, match=r"log_probs has shape \(4,\)"):
        policy_loss(
            torch.ones(4),
            advantages=square,
            response_mask=square,
            weights=square,
            old_log_probs=square,
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rejection_acts_under_every_aggregation(aggregation):
    """A mask acts under token mean and sequence mean (arcee NeMo-RL#24)."""
    losses = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    mask, weights = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    fixed = {"token_mean": 11 / 4, "seq_mean_token_sum": 11 / 2, "seq_mean_token_mean": 5.5 / 2}
    kept = {"token_mean": 11 / 3, "seq_mean_token_sum": 11 / 2, "seq_mean_token_mean": 9.5 / 2}
    for denominator, expected in (("fixed", fixed), ("kept", kept)):
        loss = aggregate(
            losses,
            response_mask=mask,
            weights=weights,
            aggregation=aggregation,
            denominator=denominator,
        )
        assert loss.item() == pytest.approx(expected[aggregation])


@pytest.mark.parametrize(("denominator", "expected"), [("fixed", 3 / 2), ("kept", 3.0)])
def test_a_rejected_sequence_leaves_the_mean_only_if_asked(denominator, expected):
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.ones(2, 2)
    loss = aggregate(
        losses,
        response_mask=mask,
        weights=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
        aggregation="seq_mean_token_sum",
        denominator=denominator,
    )
    assert loss.item() == expected


@given(
    st.sampled_from(CONFIGS),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
    st.sampled_from(AGGREGATIONS),
)
def test_values_at_masked_positions_never_matter(config, value, aggregation):
    """Flash-RL#19: mask 0 with any value, NaN included, moves neither loss nor gradient."""
    results = []
    for spoil in (False, True):
        batch = Batch()
        hidden = batch.mask == 0
        if spoil:
            for name in ("rollout", "old", "advantages", "log_probs"):
                tensor = getattr(batch, name).detach().masked_fill(hidden, value)
                setattr(batch, name, tensor)
            batch.log_probs.requires_grad_()
        weights = batch.weights(config)
        loss = batch.loss(
            config,
            weights=weights.masked_fill(hidden, value) if spoil else weights,
            aggregation=aggregation,
        )
        loss.backward()
        results.append((loss.item(), batch.log_probs.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@given(st.sampled_from(CONFIGS), st.sampled_from(AGGREGATIONS), st.integers(1, 5))
def test_micro_batches_add_up(config, aggregation, cut):
    batch = Batch()
    weights = batch.weights(config)
    counted = (batch.mask != 0) & ((weights != 0) | (config.denominator == "fixed"))
    per_token = aggregation == "token_mean"
    total = counted.sum() if per_token else counted.any(dim=-1).sum()
    parts = []
    for rows in (slice(0, cut), slice(cut, None)):
        parts.append(
            policy_loss(
                batch.log_probs[rows],
                advantages=batch.advantages[rows],
                response_mask=batch.mask[rows],
                weights=weights[rows],
                old_log_probs=batch.old[rows],
                rollout_log_probs=batch.rollout[rows],
                config=config,
                aggregation=aggregation,
                total=total,
                **CLIP,
            )
        )
    whole = batch.loss(config, aggregation=aggregation)
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-9)


def test_a_dropped_nan_rollout_does_not_reach_the_gradient():
    """verl: a NaN rollout log-prob times weight 0 gave a NaN gradient norm."""
    for objective, level in (("decoupled", "token"), ("bypass", "none")):
        batch = Batch()
        batch.rollout[0, 0] = math.nan
        config = CorrectionConfig(objective=objective, level=level, on_invalid="mask")
        batch.loss(config).backward()
        assert batch.log_probs.grad.isfinite().all()
        assert batch.log_probs.grad[0, 0] == 0.0
        assert batch.log_probs.grad.any()


def test_a_runaway_ratio_stays_finite():
    batch = Batch()
    batch.log_probs = (batch.old + 5000.0).requires_grad_()
    batch.advantages = -batch.advantages.abs()
    loss = batch.loss()
    loss.backward()
    assert math.isfinite(loss.item())
    assert batch.log_probs.grad.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.objective)
def test_only_the_current_policy_gets_a_gradient(config):
    """slime#179: neither the weight nor what it was made from is differentiated."""
    batch = Batch()
    constants = [batch.old, batch.rollout, batch.advantages, batch.weights(config)]
    for constant in constants:
        constant.requires_grad_()
    batch.loss(config, weights=constants[-1]).backward()
    assert all(constant.grad is None for constant in constants)
    assert batch.log_probs.grad.any()


def test_a_loss_at_a_masked_position_never_matters():
    losses = torch.tensor([[1.0, math.nan], [math.inf, 3.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for weights in (None, torch.tensor([[1.0, math.nan], [math.inf, 1.0]])):
        losses.grad = None
        loss = aggregate(losses, response_mask=mask, weights=weights)
        loss.backward()
        assert loss.item() == 2.0
        assert torch.equal(losses.grad, mask / 2)


def test_bypass_clips_against_the_rollout_and_its_mass():
    """top-p divided μ by S: the ratio of an exact rollout is 1 only with log S."""
    full = torch.tensor([[-1.0, -1.0]])
    log_mass = torch.full((1, 2), math.log(0.5))
    options = {
        "advantages": torch.ones(1, 2),
        "response_mask": torch.ones(1, 2),
        "weights": torch.ones(1, 2),
        "rollout_log_probs": full - log_mass,
        "config": "bypass",
    }
    assert policy_loss(full, **options).item() == pytest.approx(-0.5)
    assert policy_loss(full, log_mass=log_mass, **options).item() == pytest.approx(-1.0)


def test_an_advantage_for_each_response_reaches_its_tokens():
    batch = Batch()
    each = batch.advantages[:, 0]
    weights = batch.weights("default")
    batch.advantages = each
    loss = batch.loss(weights=weights)
    batch.advantages = each[:, None].expand_as(batch.old)
    assert loss.item() == batch.loss(weights=weights).item()


def test_what_is_missing_or_unknown_is_said():
    ones = torch.ones(1, 2)
    options = {"advantages": ones, "response_mask": ones, "weights": ones}
    with pytest.raises(ConfigError, match="objective 'decoupled' needs old_log_probs"):
        policy_loss(ones, **options)
    with pytest.raises(ConfigError, match="objective 'bypass' needs rollout_log_probs"):
        policy_loss(ones, config="bypass", **options)
    with pytest.raises(UnknownNameError, match="unknown aggregation 'mean'; known: token_mean"):
        aggregate(ones, response_mask=ones, aggregation="mean")
    with pytest.raises(UnknownNameError, match="unknown denominator 'all'; known: fixed, kept"):
        aggregate(ones, response_mask=ones, denominator="all")
