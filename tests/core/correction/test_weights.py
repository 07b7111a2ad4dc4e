"""The weights against a naive loop, known values, and the laws that they obey."""

import math

import attrs
import pytest
import torch

from flashrl.core.correction import PRESETS, CorrectionConfig, compute, get_config
from flashrl.core.correction.rejection import Filter
from flashrl.core.mismatch import log_ratios
from flashrl.errors import ConfigError, NonFiniteError, ShapeError, UnknownNameError

RATIO_FILTER = Filter(statistic="ratio", over="mean", low=0.9, high=1.1)


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


def of_ratios(*ratios, config, **options):
    """Weights and metrics of one response whose tokens have these ratios."""
    rollout = torch.full((1, len(ratios)), -4.0, dtype=torch.float64)
    old = rollout + torch.tensor([ratios], dtype=torch.float64).log()
    weights, metrics = correct(old, rollout, torch.ones(1, len(ratios)), config, **options)
    return weights[0].tolist(), metrics


def naive_weights(old, rollout, mask, config):
    """Level and bound, a token at a time, in float64."""
    weights = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        columns = [c for c in range(mask.shape[1]) if mask[row, c] != 0]
        ratios = [float(old[row, c]) - float(rollout[row, c]) for c in columns]
        for column, log_ratio in zip(columns, ratios, strict=True):
            ratio = {
                "token": math.exp(log_ratio),
                "sequence": math.exp(sum(ratios)),
                "geometric": math.exp(sum(ratios) / len(ratios)),
                "none": 1.0,
            }[config.level]
            if config.level == "none" or config.bound == "none":
                weight = ratio
            elif config.bound == "truncate":
                weight = max(config.low, min(ratio, config.high))
            else:
                weight = ratio if config.low <= ratio <= config.high else 0.0
            weights[row, column] = weight
    return weights


# --- weights


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "none"])
@pytest.mark.parametrize("bound", ["truncate", "mask", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_weights_equal_a_naive_loop(level, bound, seed):
    config = CorrectionConfig(level=level, bound=bound, low=0.6, high=1.5)
    old, rollout, mask, _ = make_batch(seed=seed)
    weights, metrics = correct(old, rollout, mask, config)
    expected = naive_weights(old, rollout, mask, config)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=1e-7)
    untouched = naive_weights(old, rollout, mask, attrs.evolve(config, bound="none"))
    share = float((expected != untouched).sum() / mask.sum())
    changed = "dropped_fraction" if bound == "mask" else "truncated_fraction"
    assert metrics[changed] == pytest.approx(share)


@pytest.mark.parametrize(
    ("level", "high", "expected"),
    [("sequence", 2.0, 2.0), ("sequence", 8.0, 2.718), ("geometric", 2.0, 1.010)],
)
def test_a_hundred_small_ratios(level, high, expected):
    """TRL#5814, NeMo-RL#2269: 100 × 0.01: product 2.718, geometric mean 1.010."""
    weights, _ = of_ratios(*[math.exp(0.01)] * 100, config=CorrectionConfig(level=level, high=high))
    assert weights == pytest.approx([expected] * 100, abs=5e-4)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("default", [0.3, 1.0, 2.0, 2.0]),
        ("off", [1.0, 1.0, 1.0, 1.0]),
        ("flashrl_c2", [0.3, 1.0, 2.0, 2.0]),
        ("flashrl_c8", [0.3, 1.0, 4.0, 8.0]),
        ("verl", [0.3, 1.0, 2.0, 2.0]),
        ("openrlhf", [0.0, 1.0, 4.0, 0.0]),
        ("trl", [0.0, 0.0, 0.0, 0.0]),  # the product is 10.8
        ("skyrl_geometric", [0.0, 0.0, 0.0, 0.0]),
        ("nemo_rl_icepop", [0.0, 1.0, 4.0, 0.0]),
        ("nemo_rl_seq_mask_tis", [0.0, 0.0, 0.0, 0.0]),
        ("bypass", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_presets_on_known_ratios(preset, expected):
    weights, _ = of_ratios(0.3, 1.0, 4.0, 9.0, config=preset)
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize(
    ("preset", "ratios", "expected"),
    [
        ("trl", (1.5, 1.9), [2.85, 2.85]),
        ("skyrl_geometric", (1.5, 1 / 1.5), [1.0, 1.0]),
        ("nemo_rl_seq_mask_tis", (1.5, 1 / 1.5), [1.5, 1 / 1.5]),
        ("nemo_rl_seq_mask_tis", (1.5, 1 / 1.49), [0.0, 0.0]),
    ],
)
def test_presets_that_keep_a_sequence(preset, ratios, expected):
    weights, _ = of_ratios(*ratios, config=preset)
    assert weights == pytest.approx(expected)


def test_every_preset_is_listed_under_its_name():
    assert [config.name for config in PRESETS.values()] == list(PRESETS)


def test_an_unknown_preset_lists_all():
    with pytest.raises(UnknownNameError, match="unknown correction 'tis'; known: default, off, fl"):
        compute(
            old_log_probs=torch.zeros(1, 1),
            rollout_log_probs=torch.zeros(1, 1),
            response_mask=torch.ones(1, 1),
            config="tis",
        )


def test_a_ready_configuration_passes_through():
    config = attrs.evolve(get_config("trl"), high=5.0)
    assert get_config(config) is config
    assert (config.level, config.bound, config.high) == ("sequence", "mask", 5.0)


def test_filters_may_come_from_a_file():
    config = CorrectionConfig(filters=[{"statistic": "k3", "over": "mean", "high": 0.1}])
    assert config.filters == (Filter(statistic="k3", over="mean", high=0.1),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "word", "bound": "clip"}, "level is 'word'.*; bound is 'clip'; allowed: 'trunc"),
        ({"low": 3.0}, "0 <= low <= high"),
        ({"low": -1.0}, "0 <= low <= high"),
        ({"high": math.nan}, "0 <= low <= high"),
        ({"high": 0.0}, "high > 0"),
        ({"veto_floor": 2.0}, r"veto_floor is a ratio in \(0, 1\], got 2.0"),
        ({"tv_delta": -0.2}, "tv_delta must be positive"),
        ({"off_policy_delta": math.inf}, "off_policy_delta must be positive and finite"),
        ({"objective": "bypass"}, "count it twice"),
        ({"level": "none", "batch_normalize": True}, "no weights to normalize"),
        ({"denominator": "all"}, "allowed: 'fixed', 'kept'"),
        ({"on_invalid": "drop"}, "allowed: 'raise', 'mask'"),
    ],
)
def test_a_wrong_configuration_says_what_is_allowed(fields, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionConfig(**fields)


# --- rejection


def test_a_veto_drops_the_sequence_that_holds_a_ruled_out_token():
    config = CorrectionConfig(level="token", veto_floor=1e-3)
    old = torch.tensor([[-1.0, -9.0], [-1.0, -7.0]])
    weights, metrics = correct(old, torch.tensor([[-1.0, -1.0]] * 2), torch.ones(2, 2), config)
    assert weights.tolist() == [[0.0, 0.0], pytest.approx([1.0, math.exp(-6)])]
    assert metrics["dropped_sequence_fraction"] == 0.5


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(1.0, [1.0, 0.0, 1.0]), (-1.0, [1.0, 1.0, 0.0]), (0.0, [1.0, 1.0, 1.0])],
)
def test_total_variation_masks_what_already_moved_too_far(advantage, expected):
    """π - μ is 0.1, 0.3 and -0.3; δ is 0.2."""
    config = CorrectionConfig(level="none", tv_delta=0.2)
    old = torch.tensor([[0.6, 0.8, 0.2]]).log()
    rollout = torch.tensor([[0.5, 0.5, 0.5]]).log()
    weights, _ = correct(
        old, rollout, torch.ones(1, 3), config, advantages=torch.tensor([advantage])
    )
    assert weights[0].tolist() == expected


def test_prime_rl_keeps_the_ratio_of_what_it_does_not_mask():
    weights, _ = correct(
        torch.tensor([[0.6, 0.8]]).log(),
        torch.tensor([[0.5, 0.5]]).log(),
        torch.ones(1, 2),
        "prime_rl_dppo_tv",
        advantages=torch.ones(1, 2),
    )
    assert weights[0].tolist() == pytest.approx([1.2, 0.0])


def test_off_policy_failures_are_dropped():
    """DeepSeek-V3.2: mean log μ - log π is 0.5 nats; δ 0.4 drops A < 0, δ 0.6 does not."""
    rollout = torch.full((2, 2), -1.0)
    old = torch.tensor([[-1.2, -1.8]] * 2)
    for delta, kept in ((0.4, [1.0, 0.0]), (0.6, [1.0, 1.0])):
        config = CorrectionConfig(level="none", off_policy_delta=delta)
        weights, _ = correct(
            old, rollout, torch.ones(2, 2), config, advantages=torch.tensor([1.0, -1.0])
        )
        assert weights[:, 0].tolist() == kept


def test_every_criterion_must_pass():
    old, rollout, mask, advantages = make_batch(batch=64)
    parts = [
        CorrectionConfig(filters=(RATIO_FILTER,)),
        CorrectionConfig(veto_floor=0.5),
        CorrectionConfig(tv_delta=0.1),
        CorrectionConfig(off_policy_delta=0.05),
    ]
    everything = CorrectionConfig(
        filters=(RATIO_FILTER,), veto_floor=0.5, tv_delta=0.1, off_policy_delta=0.05
    )
    kept = mask.bool()
    for part in parts:
        kept = kept & (correct(old, rollout, mask, part, advantages=advantages).weights != 0)
    weights = correct(old, rollout, mask, everything, advantages=advantages).weights
    assert 0 < int(kept.sum()) < int(mask.sum())
    torch.testing.assert_close(weights != 0, kept)


def test_a_mask_that_needs_advantages_asks_for_them():
    old, rollout, mask, _ = make_batch()
    with pytest.raises(ConfigError, match="'prime_rl_dppo_tv' masks by the sign of the advantages"):
        correct(old, rollout, mask, "prime_rl_dppo_tv")


def test_all_rejected_is_flagged_and_finite(caplog):
    """verl#3984: all tokens rejected: everything finite, and flagged."""
    weights, metrics = of_ratios(5.0, 6.0, config=CorrectionConfig(bound="mask", high=2.0))
    assert weights == [0.0, 0.0]
    assert metrics["all_dropped"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert "dropped every token" in caplog.text
    assert of_ratios(1.0, 6.0, config=CorrectionConfig(bound="mask"))[1]["all_dropped"] == 0.0


# --- the whole batch


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalized_weights_have_mean_one(level):
    old, rollout, mask, _ = make_batch()
    config = CorrectionConfig(level=level, high=1.2, batch_normalize=True)
    weights, metrics = correct(old, rollout, mask, config)
    plain, _ = correct(old, rollout, mask, attrs.evolve(config, batch_normalize=False))
    torch.testing.assert_close(weights * metrics["batch_norm_factor"], plain)
    if level == "token":
        assert float(weights.sum() / mask.sum()) == pytest.approx(1.0)
    else:
        assert float(weights[:, 0].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(("denominator", "counted"), [("fixed", 4), ("kept", 2)])
def test_the_denominator_of_the_mean_is_that_of_the_loss(denominator, counted):
    config = CorrectionConfig(bound="mask", high=3.0, batch_normalize=True, denominator=denominator)
    weights, _ = of_ratios(1.0, 2.0, 5.0, 5.0, config=config)
    assert sum(weights) == pytest.approx(counted)


def test_adaptive_weights_lie_between_uncorrected_and_corrected():
    old, rollout, mask, _ = make_batch()
    full, _ = correct(old, rollout, mask, "default")
    weights, metrics = correct(old, rollout, mask, "ais")
    alpha = metrics["ais_coefficient"]
    expected_alpha = (
        metrics["weight_ess"]
        * (1 - math.exp(-metrics["k3"] / 0.01))
        / max(1.0, 1 + metrics["chi2_token"])
    )
    assert 0 < alpha < 1
    assert alpha == pytest.approx(expected_alpha)
    torch.testing.assert_close(weights, (1 - alpha) * mask + alpha * full)


def test_adaptive_weights_leave_an_exact_rollout_alone_and_drop_what_is_dropped():
    log_probs, _, mask, _ = make_batch()
    weights, metrics = correct(log_probs, log_probs, mask, "ais")
    assert metrics["ais_coefficient"] == 0.0
    torch.testing.assert_close(weights, mask)
    config = CorrectionConfig(bound="mask", high=2.0, adaptive_kl_scale=0.01)
    assert of_ratios(1.5, 3.0, config=config)[0][1] == 0.0


def test_blocks_never_show(monkeypatch):
    old, rollout, mask, advantages = make_batch(batch=11)
    config = CorrectionConfig(
        level="sequence", filters=(RATIO_FILTER,), tv_delta=0.3, batch_normalize=True
    )
    weights, metrics = correct(old, rollout, mask, config, advantages=advantages)
    monkeypatch.setitem(log_ratios._BLOCK_TOKENS, "cpu", 40)
    in_blocks, block_metrics = correct(old, rollout, mask, config, advantages=advantages)
    torch.testing.assert_close(in_blocks, weights)
    assert block_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def _one_rank(rank, store, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    rows = slice(0, 3) if rank == 0 else slice(3, 8)
    old, rollout, mask, _ = (tensor[rows].clone() for tensor in make_batch())
    config = CorrectionConfig(high=1.2, batch_normalize=True)
    group = torch.distributed.group.WORLD
    weights, metrics = correct(old, rollout, mask, config, group=group)
    if rank == 0:
        old[0, 0] = math.nan
    try:
        correct(old, rollout, mask, config, group=group)
    except NonFiniteError as error:
        results[rank] = (weights, metrics, str(error))
    torch.distributed.destroy_process_group()


def test_ranks_normalize_over_the_whole_batch_and_fail_together(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    with context.Manager() as manager:
        results = manager.dict()
        ranks = [
            context.Process(target=_one_rank, args=(rank, tmp_path / "store", results))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        results = dict(results)
    old, rollout, mask, _ = make_batch()
    weights, metrics = correct(old, rollout, mask, CorrectionConfig(high=1.2, batch_normalize=True))
    torch.testing.assert_close(torch.cat([results[0][0], results[1][0]]), weights)
    assert results[0][1] == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    assert results[1][1] == results[0][1]
    assert "old_log_probs[0, 0] is nan" in results[0][2]
    assert "another rank" in results[1][2]


# --- what goes in


@pytest.mark.parametrize("config", ["bypass", "prime_rl_dppo_tv"])
def test_bypass_measures_the_current_policy(config):
    """verl#4070: there old_log_probs are the rollout's own, and every metric would be 0."""
    log_probs, rollout, mask, advantages = make_batch()
    options = {
        "rollout_log_probs": rollout,
        "response_mask": mask,
        "advantages": advantages,
        "config": config,
    }
    _, metrics = compute(log_probs=log_probs, old_log_probs=rollout, **options)
    mean = ((rollout - log_probs) * mask).sum() / mask.sum()
    assert metrics["k1"] == pytest.approx(float(mean), rel=1e-4)
    with pytest.raises(ConfigError, match="compares the rollout with log_probs, which were not"):
        compute(old_log_probs=rollout, **options)


def test_decoupled_needs_the_old_policy():
    log_probs, rollout, mask, _ = make_batch()
    with pytest.raises(ConfigError, match="'default' compares the rollout with old_log_probs"):
        compute(log_probs=log_probs, rollout_log_probs=rollout, response_mask=mask)


def test_log_mass_takes_the_bias_out_of_the_weights():
    """top-p 0.9 divided μ by S = 0.9: without log S every weight of an exact rollout is 0.9."""
    old = torch.tensor([[-0.5, -2.0]])
    log_mass = torch.full((1, 2), math.log(0.9))
    rollout, mask = old - log_mass, torch.ones(1, 2)
    assert correct(old, rollout, mask).weights[0].tolist() == pytest.approx([0.9, 0.9])
    weights, _ = correct(old, rollout, mask, log_mass=log_mass)
    assert weights[0].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs"])
def test_an_unusable_log_prob_is_an_error_or_a_dropped_token(name, value):
    """verl: a NaN rollout log-prob times weight 0 made the gradient norm NaN."""
    old, rollout, mask, _ = make_batch()
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout}
    expected = correct(old, rollout, mask).weights
    tensors[name][2, 0] = value
    with pytest.raises(NonFiniteError, match=rf"{name}\[2, 0\] is "):
        compute(**tensors, response_mask=mask)
    weights, metrics = compute(
        **tensors, response_mask=mask, config=CorrectionConfig(on_invalid="mask")
    )
    expected[2, 0] = 0.0
    torch.testing.assert_close(weights, expected)
    assert metrics["invalid_fraction"] == pytest.approx(1 / float(mask.sum()))


def test_a_batch_without_one_usable_token_survives():
    nan = torch.full((2, 3), math.nan)
    config = CorrectionConfig(on_invalid="mask", batch_normalize=True, adaptive_kl_scale=0.1)
    weights, metrics = correct(nan, nan, torch.ones(2, 3), config)
    assert weights.abs().sum() == 0
    assert (metrics["invalid_fraction"], metrics["all_dropped"]) == (1.0, 1.0)


def test_an_empty_batch_is_not_a_rejected_one():
    old, rollout, mask, _ = make_batch()
    _, metrics = correct(old, rollout, torch.zeros_like(mask))
    assert metrics["all_dropped"] == 0.0
    weights, metrics = correct(old[:0], rollout[:0], mask[:0])
    assert weights.shape == (0, 19)
    assert metrics["all_dropped"] == 0.0


def test_missing_or_misshapen_log_probs_are_an_error():
    """vime#70: missing log-probs are never 0.0; a length mismatch is an error."""
    old, rollout, mask, advantages = make_batch()
    with pytest.raises(ShapeError, match=r"rollout_log_probs must be .* got NoneType"):
        correct(old, None, mask)
    with pytest.raises(ShapeError, match=r"rollout_log_probs has shape \(8, 18\)"):
        correct(old, rollout[:, 1:], mask)
    with pytest.raises(ShapeError, match=r"log_mass has shape \(8,\)"):
        correct(old, rollout, mask, log_mass=rollout[:, 0])
    with pytest.raises(ShapeError, match=r"advantages has shape \(8, 1\)"):
        correct(old, rollout, mask, advantages=advantages[:, :1])
    with pytest.raises(ShapeError, match="response_mask must be"):
        correct(old, rollout, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_inputs_are_computed_in_float32(dtype):
    old, rollout, mask, _ = make_batch()
    weights, _ = correct(old.to(dtype), rollout.to(dtype), mask.bool())
    expected = naive_weights(old.to(dtype), rollout.to(dtype), mask, get_config("default"))
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
