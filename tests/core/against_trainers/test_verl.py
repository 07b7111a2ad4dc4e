"""The correction and the losses of verl 0.9, on the same batches."""

import importlib
import math
import types
import warnings

import attrs
import pytest
import torch

from flashrl.core.correction import CorrectionConfig, get_config
from flashrl.core.correction.losses import aggregate
from flashrl.core.correction.rejection import Filter

# What a peer or its dependencies deprecate is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = range(4)
OVER = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


@pytest.fixture(scope="module")
def verl(require_peer):
    """The helper and the losses."""
    require_peer("verl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ("trainer.ppo.rollout_corr_helper", "trainer.ppo.core_algos", "workers.config")
        helper, algos, config = (importlib.import_module(f"verl.{name}") for name in names)
    return types.SimpleNamespace(
        helper=helper,
        algos=algos,
        actor_config=config.ActorConfig,
        loss_config=config.PolicyLossConfig,
    )


def verl_correct(verl, batch, **options):
    proto, mask, metrics = verl.helper.compute_rollout_correction_and_rejection_mask(
        batch.old, batch.rollout, batch.mask, **options
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return weights, mask, {k.removeprefix("rollout_corr/"): v for k, v in metrics.items()}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.3, "0.8_1.5"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_those_of_verl(verl, seed, level, threshold, normalize, make_batch):
    batch = make_batch(seed, spread=0.1)
    theirs, _, metrics = verl_correct(
        verl,
        batch,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
    )
    low, high = (0.0, 1.3) if threshold == 1.3 else (0.8, 1.5)
    config = CorrectionConfig(
        level=level,
        bound="truncate" if threshold == 1.3 else "mask",
        low=low,
        high=high,
        batch_normalize=normalize,
    )
    ours = batch.correct(config)
    torch.testing.assert_close(ours.weights, theirs)
    expected = {
        "weight_mean": metrics["rollout_is_mean"],
        "weight_std": metrics["rollout_is_std"],
        "weight_ess": metrics["rollout_is_eff_sample_size"],
    }
    if level == "token":  # at sequence level verl reports the extremes before truncation
        expected["weight_max"] = metrics["rollout_is_max"]
        expected["weight_min"] = metrics["rollout_is_min"]
    if normalize:
        expected["batch_norm_factor"] = metrics["rollout_is_batch_norm_factor"]
    assert {name: ours.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_mismatch_metrics_are_those_of_verl(verl, seed, make_batch):
    batch = make_batch(seed)
    _, _, theirs = verl_correct(verl, batch)
    ours = batch.correct("off").metrics
    for name, verl_name in (
        ("k1", "kl"),
        ("k3", "k3_kl"),
        ("chi2_token", "chi2_token"),
        ("chi2_sequence", "chi2_seq"),
    ):
        assert ours[name] == pytest.approx(theirs[verl_name], rel=1e-6)


def test_the_perplexity_ratio_weighs_tokens_not_sequences(verl, make_batch):
    """One ratio per sequence, averaged, lets a short response count as much as a long one.

    Such a mean of means cannot be added up from shards (slime#429); for one sequence both agree.
    """
    batch = make_batch(0, batch=1)
    _, _, theirs = verl_correct(verl, batch)
    assert batch.correct("off").metrics["ppl_ratio"] == pytest.approx(theirs["ppl_ratio"])
    batch = make_batch(0)
    _, _, theirs = verl_correct(verl, batch)
    mean = ((batch.old - batch.rollout) * batch.mask).sum() / batch.mask.sum()
    ours = batch.correct("off").metrics["ppl_ratio"]
    assert ours == pytest.approx(math.exp(-float(mean)))
    assert ours != pytest.approx(theirs["ppl_ratio"], rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("over", list(OVER))
@pytest.mark.parametrize("statistic", ["k2", "k3"])
def test_divergence_filters_are_those_of_verl(verl, seed, over, statistic, make_batch):
    batch = make_batch(seed)
    threshold = {"token": 0.05, "seq_sum": 0.6, "seq_mean": 0.08, "seq_max": 0.4}[over]
    _, kept, metrics = verl_correct(
        verl, batch, rollout_rs=f"{over}_{statistic}", rollout_rs_threshold=threshold
    )
    criterion = Filter(statistic=statistic, over=OVER[over], high=threshold)
    ours = batch.correct(CorrectionConfig(level="none", filters=(criterion,)))
    assert 0 < float(kept.sum()) < float(batch.mask.sum())
    torch.testing.assert_close(ours.weights, kept)
    assert ours.metrics["dropped_fraction"] == pytest.approx(metrics["rollout_rs_masked_fraction"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("over", ["token", "seq_sum", "seq_mean"])
def test_bounds_are_on_the_ratio_where_verl_bounds_its_inverse(verl, seed, over, make_batch):
    """A k1 of -ℓ within log bounds: "0.8_1.1" of verl keeps 1/1.1 ≤ ρ ≤ 1/0.8.

    Here bounds are on ρ, as in every formula: the same filter is written [1/1.1, 1/0.8].
    """
    batch = make_batch(seed, batch=40, spread=0.25)
    _, kept, _ = verl_correct(verl, batch, rollout_rs=f"{over}_k1", rollout_rs_threshold="0.8_1.1")
    criterion = Filter(statistic="ratio", over=OVER[over], low=1 / 1.1, high=1 / 0.8)
    ours = batch.correct(CorrectionConfig(level="none", filters=(criterion,)))
    assert 0 < float(kept.sum()) < float(batch.mask.sum())
    torch.testing.assert_close(ours.weights, kept)


VERL_AGGREGATION = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
}


def verl_actor(verl, **options):
    return verl.actor_config(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_c=1e6,  # no dual clip: it is no part of the formula
        **options,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", list(VERL_AGGREGATION))
def test_the_decoupled_loss_is_that_of_verl(
    verl, seed, aggregation, make_batch, assert_same_loss_and_gradient
):
    batch = make_batch(seed)
    weights, _, _ = verl_correct(verl, batch, rollout_is="token", rollout_is_threshold=2.0)
    theirs, _ = verl.algos.compute_policy_loss_vanilla(
        old_log_prob=batch.old,
        log_prob=batch.log_probs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=VERL_AGGREGATION[aggregation],
        config=verl_actor(verl, clip_ratio_low=0.2, clip_ratio_high=0.28),
        rollout_is_weights=weights,
    )
    ours = batch.loss("verl", aggregation=aggregation, clip_high=0.28)
    assert_same_loss_and_gradient(ours, theirs, batch.log_probs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", list(VERL_AGGREGATION))
def test_a_rejection_of_verl_is_the_denominator_kept(
    verl, seed, aggregation, make_batch, assert_same_loss_and_gradient
):
    """A rejection there goes into the response mask, so it leaves the denominator too."""
    batch = make_batch(seed)
    _, kept, _ = verl_correct(verl, batch, rollout_rs="token_k3", rollout_rs_threshold=0.05)
    theirs, _ = verl.algos.compute_policy_loss_vanilla(
        old_log_prob=batch.old,
        log_prob=batch.log_probs,
        advantages=batch.advantages,
        response_mask=kept,
        loss_agg_mode=VERL_AGGREGATION[aggregation],
        config=verl_actor(verl),
    )
    config = CorrectionConfig(
        level="none",
        filters=(Filter(statistic="k3", over="token", high=0.05),),
        denominator="kept",
    )
    ours = batch.loss(config, aggregation=aggregation)
    assert_same_loss_and_gradient(ours, theirs, batch.log_probs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss_type", "config"),
    [
        ("ppo_clip", CorrectionConfig(objective="bypass", level="none", denominator="kept")),
        (
            "reinforce",
            CorrectionConfig(objective="policy_gradient", high=1.3, denominator="kept"),
        ),
    ],
)
def test_bypass_losses_are_those_of_verl(
    verl, seed, loss_type, config, make_batch, assert_same_loss_and_gradient
):
    batch = make_batch(seed)
    config = attrs.evolve(config, filters=(Filter(statistic="k2", over="mean", high=0.12),))
    correction = {
        "loss_type": loss_type,
        "rollout_is": "token",
        "rollout_is_threshold": 1.3,
        "rollout_rs": "seq_mean_k2",
        "rollout_rs_threshold": 0.12,
    }
    theirs, metrics = verl.algos.compute_policy_loss_bypass_mode(
        old_log_prob=batch.rollout,
        log_prob=batch.log_probs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        config=verl_actor(verl, policy_loss=verl.loss_config(rollout_correction=correction)),
    )
    assert_same_loss_and_gradient(batch.loss(config), theirs, batch.log_probs)
    ours = batch.correct(config).metrics
    assert ours["k1"] == pytest.approx(metrics["rollout_corr/kl"], rel=1e-6)
    assert 0 < ours["dropped_sequence_fraction"] < 1


@pytest.mark.parametrize("seed", SEEDS)
def test_total_variation_masks_are_those_of_verl(
    verl, seed, make_batch, assert_same_loss_and_gradient
):
    batch = make_batch(seed)
    config = attrs.evolve(get_config("prime_rl_dppo_tv"), tv_delta=0.02)
    theirs, metrics = verl.algos.compute_policy_loss_dppo_tv(
        old_log_prob=batch.rollout,
        log_prob=batch.log_probs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        config=verl_actor(verl, clip_ratio=0.02, clip_ratio_low=0.02, clip_ratio_high=0.02),
    )
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    assert_same_loss_and_gradient(batch.loss(config), theirs, batch.log_probs)


def test_all_rejected_is_zero_where_verl_divides_by_zero(verl, make_batch):
    """verl#3984: nothing left in the mask is 0/0 there; here the loss is 0."""
    batch = make_batch(0)
    losses, nothing = torch.ones_like(batch.mask), torch.zeros_like(batch.mask)
    assert math.isnan(verl.algos.agg_loss(losses, nothing, "token-mean"))
    ours = aggregate(losses, response_mask=batch.mask, weights=nothing, denominator="kept")
    assert ours.item() == 0.0


def test_a_nan_at_a_masked_position_matters_to_verl_only(verl, make_batch):
    """0 · NaN is NaN: a rollout that pads with NaN poisons verl's weights; here it is masked."""
    batch = make_batch(0)
    hidden = batch.mask == 0
    expected = batch.correct("verl").weights
    batch.rollout = batch.rollout.masked_fill(hidden, math.nan)
    theirs, _, _ = verl_correct(verl, batch, rollout_is="token", rollout_is_threshold=2.0)
    assert theirs[hidden].isnan().all()
    torch.testing.assert_close(batch.correct("verl").weights, expected)
