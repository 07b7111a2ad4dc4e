"""What must hold for every correction, whatever its configuration."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.correction import PRESETS, CorrectionConfig, compute, get_config
from flashrl.core.correction.rejection import Filter


def make_batch(batch=8, length=19, spread=0.4, seed=0):
    """A ragged batch: log π, log μ, mask, advantages."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(batch, length, generator=generator)
    old = (rollout + spread * torch.randn(batch, length, generator=generator)).clamp(max=0.0)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    mask = (torch.arange(length) < lengths).float()
    advantages = torch.randn(batch, length, generator=generator)
    return old, rollout, mask, advantages


def correct(old, rollout, mask, config="default", **options):
    """Call with the policy that the configuration's objective asks for."""
    objective = get_config(config).objective
    name = "old_log_probs" if objective == "decoupled" else "log_probs"
    return compute(
        **{name: old}, rollout_log_probs=rollout, response_mask=mask, config=config, **options
    )


GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 3.0])
CONFIGS = st.sampled_from(
    [
        *PRESETS.values(),
        CorrectionConfig(level="sequence", batch_normalize=True),
        CorrectionConfig(
            filters=(Filter(statistic="ratio", over="mean", low=0.9, high=1.1),),
            veto_floor=0.5,
            off_policy_delta=0.1,
        ),
        *(
            CorrectionConfig(filters=(Filter(statistic="k3", over=over, high=0.2),))
            for over in ("token", "sum", "mean", "max")
        ),
    ]
)


@given(CONFIGS, GARBAGE, st.integers(0, 100))
def test_values_at_masked_positions_never_matter(config, value, seed):
    """Flash-RL#19: mask 0 with any value, NaN included, moves neither weights nor metrics."""
    old, rollout, mask, advantages = make_batch(seed=seed)
    weights, metrics = correct(old, rollout, mask, config, advantages=advantages)
    spoiled = [tensor.masked_fill(mask == 0, value) for tensor in (old, rollout, advantages)]
    again, metrics_again = correct(*spoiled[:2], mask, config, advantages=spoiled[2])
    assert torch.equal(again, weights)
    assert metrics_again == metrics


@given(CONFIGS, st.integers(0, 9), st.integers(0, 9))
def test_padding_on_either_side_only_shifts_the_weights(config, left, right):
    batch = make_batch()
    weights, metrics = correct(*batch[:3], config, advantages=batch[3])
    padded = [torch.nn.functional.pad(tensor, (left, right)) for tensor in batch]
    shifted, metrics_again = correct(*padded[:3], config, advantages=padded[3])
    torch.testing.assert_close(shifted, torch.nn.functional.pad(weights, (left, right)))
    assert metrics_again == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@given(CONFIGS, st.permutations(range(8)))
def test_permuting_sequences_permutes_the_weights(config, order):
    batch = make_batch()
    weights, metrics = correct(*batch[:3], config, advantages=batch[3])
    shuffled = [tensor[order] for tensor in batch]
    again, metrics_again = correct(*shuffled[:3], config, advantages=shuffled[3])
    torch.testing.assert_close(again, weights[order])
    assert metrics_again == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@given(
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "mask"]),
    st.floats(0.1, 10.0),
    st.integers(0, 100),
    st.floats(0.0, 30.0),
)
def test_weights_lie_between_zero_and_the_cap(level, bound, cap, seed, spread):
    old, rollout, mask, _ = make_batch(seed=seed, spread=spread)
    config = CorrectionConfig(level=level, bound=bound, high=cap)
    weights, metrics = correct(old, rollout, mask, config)
    assert 0 <= float(weights.min()) <= float(weights.max()) <= cap * (1 + 1e-6)
    assert all(math.isfinite(value) for value in metrics.values())


@given(CONFIGS)
def test_weights_carry_no_gradient(config):
    """slime#179: the weight is a constant of the loss."""
    old, rollout, mask, advantages = make_batch()
    old.requires_grad_()
    rollout.requires_grad_()
    weights, _ = correct(old, rollout, mask, config, advantages=advantages.requires_grad_())
    assert not weights.requires_grad
    assert weights.grad_fn is None
