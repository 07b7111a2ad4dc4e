"""The metrics against naive float64 loops, scipy, and values worked out by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from flashrl.core.mismatch import MismatchState, measure
from flashrl.errors import NonFiniteError, ShapeError

LOG2 = math.log(2.0)


def make_batch(batch=7, length=23, spread=0.3, seed=0, dtype=torch.float32):
    """A ragged batch: log π, log μ, mask, weights."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(batch, length, generator=generator)
    old = (rollout + spread * torch.randn(batch, length, generator=generator)).clamp(max=0.0)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    mask = (torch.arange(length) < lengths).float()
    weights = (old - rollout).exp().clamp(max=1.3) * mask
    return old.to(dtype), rollout.to(dtype), mask, weights


def compute(old, rollout, mask, **options):
    state = measure(old_log_probs=old, rollout_log_probs=rollout, response_mask=mask, **options)
    return state.compute()


def of_ratios(*ratios, log_rollout=-1.0, **options):
    """The metrics of one response whose tokens have these ratios."""
    rollout = torch.full((1, len(ratios)), log_rollout - 3.0, dtype=torch.float64)
    old = rollout + torch.tensor([ratios], dtype=torch.float64).log()
    return compute(old, rollout, torch.ones(1, len(ratios)), **options)


def naive(old, rollout, mask, weights):
    """Every metric but the percentiles, one token at a time, in float64."""
    tokens, sequences, sequence_weights = [], [], []
    for row in range(mask.shape[0]):
        picked = [c for c in range(mask.shape[1]) if mask[row, c] != 0]
        if picked:
            sequences.append([float(old[row, c]) - float(rollout[row, c]) for c in picked])
            sequence_weights.append(np.mean([float(weights[row, c]) for c in picked]))
        tokens += [
            (float(old[row, c]), float(rollout[row, c]), float(weights[row, c])) for c in picked
        ]
    pi, mu, w = (np.array(column) for column in zip(*tokens, strict=True))
    log_ratio = pi - mu
    rho = np.exp(log_ratio)
    product = np.array([math.exp(math.fsum(s)) for s in sequences])
    js = 0.5 * (rho * np.log(2 * rho / (1 + rho)) + np.log(2 / (1 + rho)))
    return {
        "num_tokens": len(tokens),
        "num_sequences": len(sequences),
        "invalid_fraction": 0.0,
        "k1": -log_ratio.mean(),
        "k2": (log_ratio**2).mean() / 2,
        "k3": (rho - 1 - log_ratio).mean(),
        "reverse_k1": (rho * log_ratio).mean(),
        "reverse_k3": (rho * log_ratio - rho + 1).mean(),
        "js": js.mean(),
        "chi2_token": (rho**2).mean() - 1,
        "chi2_sequence": (product**2).mean() - 1,
        "ess": 1 / ((rho / rho.mean()) ** 2).mean(),
        "ess_sequence": 1 / ((product / product.mean()) ** 2).mean(),
        "ppl_ratio": math.exp(-log_ratio.mean()),
        "tmpe": np.exp(np.abs(log_ratio)).mean(),
        "prob_diff_mean": np.abs(np.exp(pi) - np.exp(mu)).mean(),
        "prob_diff_max": np.abs(np.exp(pi) - np.exp(mu)).max(),
        "log_ratio_std": log_ratio.std(),
        "log_ratio_max": np.abs(log_ratio).max(),
        "ratio_mean": rho.mean(),
        "ratio_std": rho.std(),
        "ratio_max": rho.max(),
        "ratio_min": rho.min(),
        "ratio_outside": ((rho < 0.9) | (rho > 1.1)).mean(),
        "geometric_ratio_mean": np.mean([math.exp(np.mean(s)) for s in sequences]),
        "weight_mean": w.mean(),
        "weight_std": w.std(),
        "weight_max": w.max(),
        "weight_min": w.min(),
        "weight_outside": ((w < 0.9) | (w > 1.1)).mean(),
        "weight_ess": 1 / ((w / w.mean()) ** 2).mean(),
        "weight_sequence_mean": np.mean(sequence_weights),
        "dropped_fraction": (w == 0).mean(),
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_metric_equals_a_naive_loop(seed, dtype):
    old, rollout, mask, weights = make_batch(seed=seed, dtype=dtype)
    weights[0, 0] = 0.0
    metrics = compute(old, rollout, mask, weights=weights)
    expected = naive(old, rollout, mask, weights)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_within_their_stated_resolution(seed):
    old, rollout, mask, weights = make_batch(batch=20, length=200, seed=seed, dtype=torch.float64)
    metrics = compute(old, rollout, mask, weights=weights)
    log_ratio = (old - rollout)[mask != 0].numpy()
    for name, values in (
        ("ratio_p95", np.exp(log_ratio)),
        ("weight_p95", weights[mask != 0].numpy()),
    ):
        exact = np.quantile(values, 0.95, method="inverted_cdf")
        assert math.log(metrics[name] / exact) == pytest.approx(
            0.0, abs=max(0.002 * abs(math.log(exact)), 1.3e-4)
        )
    exact = np.quantile(np.abs(log_ratio), 0.95, method="inverted_cdf")
    assert metrics["log_ratio_p95"] == pytest.approx(exact, rel=0.002)


@pytest.mark.parametrize(
    ("ratio", "k1", "k2", "k3"), [(2.0, -0.693, 0.240, 0.307), (0.5, 0.693, 0.240, 0.193)]
)
def test_the_three_estimators_at_known_ratios(ratio, k1, k2, k3):
    metrics = of_ratios(ratio)
    assert [metrics[name] for name in ("k1", "k2", "k3")] == pytest.approx([k1, k2, k3], abs=5e-4)


def test_estimates_are_exact_divergences_when_the_sample_is_the_distribution():
    """Tokens occur exactly as often as μ says, so a mean over them is an expectation under μ."""
    mu = np.array([5, 3, 1, 1]) / 10
    pi = np.array([0.4, 0.2, 0.3, 0.1])
    tokens = [0] * 5 + [1] * 3 + [2, 3]
    old, rollout = (torch.from_numpy(np.log(p)[tokens])[None] for p in (pi, mu))
    metrics = compute(old, rollout, torch.ones(1, 10))
    for name in ("k1", "k3"):
        assert metrics[name] == pytest.approx(entropy(mu, pi))
    for name in ("reverse_k1", "reverse_k3"):
        assert metrics[name] == pytest.approx(entropy(pi, mu))
    assert metrics["js"] == pytest.approx(jensenshannon(pi, mu) ** 2)
    assert metrics["chi2_token"] == pytest.approx(((pi - mu) ** 2 / mu).sum())
    assert metrics["ratio_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("weights", "ess"), [([1.0, 1, 1, 1], 1.0), ([2.0, 0, 0, 0], 0.25), ([0.0, 0, 0, 0], 0.0)]
)
def test_effective_sample_size_of_known_weights(weights, ess):
    metrics = of_ratios(1.0, 1.0, 1.0, 1.0, weights=torch.tensor([weights]))
    assert metrics["weight_ess"] == pytest.approx(ess)
    assert metrics["ess"] == pytest.approx(1.0)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_padding_is_no_extreme(ratio):
    """A masked position is neither a ratio of 1 nor a weight of 0."""
    rollout = torch.full((3, 4), -3.0)
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    weights = torch.full((3, 4), ratio)
    metrics = compute(rollout + math.log(ratio), rollout, mask, weights=weights * mask)
    for name in ("ratio_min", "ratio_p95", "ratio_max", "ratio_mean", "weight_min", "weight_max"):
        assert metrics[name] == pytest.approx(ratio, rel=2e-3)
    assert metrics["num_sequences"] == 2.0
    assert metrics["dropped_fraction"] == metrics["dropped_sequence_fraction"] == 0.0


def test_effective_sample_size_survives_when_nearly_all_is_dropped():
    weights = torch.zeros(1, 100_000)
    weights[0, 0] = 1.0
    log_probs = torch.full((1, 100_000), -1.0)
    metrics = compute(log_probs, log_probs, torch.ones(1, 100_000), weights=weights)
    assert metrics["weight_ess"] == pytest.approx(1e-5, rel=1e-6)


def test_a_long_response_has_a_large_product_and_a_small_geometric_mean():
    """TRL#5814, NeMo-RL#2269: 100 tokens of 0.01: product 2.718, geometric mean 1.010."""
    metrics = of_ratios(*[math.exp(0.01)] * 100)
    assert 1 + metrics["chi2_sequence"] == pytest.approx(math.e**2)
    assert metrics["geometric_ratio_mean"] == pytest.approx(1.01005, abs=1e-5)


def test_a_mean_of_one_does_not_hide_the_spread():
    """TRL#6789: report sd, p95, max and the fraction outside [0.9, 1.1] beside the mean."""
    metrics = of_ratios(*[1.0] * 80, *[0.5] * 10, *[1.5] * 10)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["ratio_std"] == pytest.approx(math.sqrt(0.2 * 0.25))
    assert metrics["ratio_p95"] == pytest.approx(1.5, rel=1e-3)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["ratio_min"] == pytest.approx(0.5)
    assert metrics["ratio_outside"] == pytest.approx(0.2)


def test_a_tiny_mismatch_keeps_its_digits():
    """ρ = 1 + 1e-4 in float32: E[ρ²] - E[ρ]² from sums of ρ would be rounding noise."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(8, 4096, generator=generator) - 1
    old = rollout + 1e-4 * torch.randn(8, 4096, generator=generator)
    log_ratio = (old.double() - rollout.double()).numpy()
    metrics = compute(old, rollout, torch.ones(8, 4096))
    assert metrics["ratio_std"] == pytest.approx(np.exp(log_ratio).std(), rel=1e-3)
    assert metrics["k3"] == pytest.approx((np.expm1(log_ratio) - log_ratio).mean(), rel=0.05)


def test_equal_distributions_have_no_mismatch():
    log_probs, _, mask, _ = make_batch()
    metrics = compute(log_probs, log_probs, mask)
    zero = ("k1", "k2", "k3", "reverse_k1", "js", "chi2_token", "chi2_sequence", "ratio_std")
    one = ("ess", "ess_sequence", "ppl_ratio", "tmpe", "ratio_p95", "ratio_max", "ratio_min")
    assert [metrics[name] for name in zero] == [0.0] * len(zero)
    assert [metrics[name] for name in one] == [1.0] * len(one)


def test_no_tokens_read_like_no_mismatch():
    old, rollout, mask, weights = make_batch()
    for shape in ((0, 5), (3, 0), tuple(mask.shape)):
        cut = (slice(shape[0]), slice(shape[1]))
        metrics = compute(old[cut], rollout[cut], torch.zeros(shape), weights=weights[cut])
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["num_tokens"] == 0.0
        assert metrics["ess"] == metrics["ratio_p95"] == metrics["ppl_ratio"] == 1.0
        assert metrics["k1"] == metrics["log_ratio_p95"] == 0.0


@pytest.mark.parametrize("log_ratio", [-300.0, -25.0, 25.0, 300.0])
def test_extreme_ratios_stay_finite(log_ratio):
    old = torch.tensor([[min(0.0, log_ratio), -1.0]])
    rollout = torch.tensor([[min(0.0, -log_ratio), -1.0]])
    metrics = compute(old, rollout, torch.ones(1, 2), weights=torch.ones(1, 2))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["k1"] == pytest.approx(-log_ratio / 2)
    assert metrics["ratio_max"] == pytest.approx(math.exp(min(20.0, max(0.0, log_ratio))))
    assert metrics["prob_diff_max"] == pytest.approx(1.0, abs=1e-6)


def test_log_mass_compares_like_with_like():
    """top-p 0.9 renormalized μ by S = 0.9; without quantization ρ is 1, not 0.9."""
    full = torch.tensor([[-0.5, -2.0]])
    log_mass = torch.full((1, 2), math.log(0.9))
    rollout, mask = full - log_mass, torch.ones(1, 2)
    assert compute(full, rollout, mask)["ratio_mean"] == pytest.approx(0.9)
    metrics = compute(full, rollout, mask, log_mass=log_mass)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["prob_diff_max"] == pytest.approx(0.0, abs=1e-6)


def test_log_probs_filled_with_zero_show():
    """OpenRLHF stores 0.0 for a log-probability that the engine did not return."""
    old, rollout, mask, _ = make_batch()
    rollout[0] = 0.0
    share = mask[0].sum() / mask.sum()
    assert compute(old, rollout, mask)["zero_fraction"] == pytest.approx(float(share))


# --- what must not count


GARBAGE = [math.nan, math.inf, -math.inf, 1e30, 5.0, 0.0]


@given(st.sampled_from(GARBAGE), st.sampled_from(GARBAGE), st.integers(0, 100))
def test_values_at_masked_positions_never_matter(old_value, rollout_value, seed):
    """Flash-RL#19: mask 0 with any value, NaN included, does not move a metric."""
    old, rollout, mask, weights = make_batch(seed=seed)
    expected = compute(old, rollout, mask, weights=weights)
    hidden = mask == 0
    spoiled = [
        tensor.masked_fill(hidden, value)
        for tensor, value in ((old, old_value), (rollout, rollout_value), (weights, rollout_value))
    ]
    metrics = compute(*spoiled[:2], mask, weights=spoiled[2])
    assert metrics == expected


@given(st.integers(0, 100), st.integers(0, 9), st.integers(0, 9))
def test_padding_on_either_side_never_matters(seed, left, right):
    batch = make_batch(seed=seed)
    expected = compute(*batch[:3], weights=batch[3])
    padded = [torch.nn.functional.pad(tensor, (left, right)) for tensor in batch]
    assert compute(*padded[:3], weights=padded[3]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@given(st.permutations(range(7)))
def test_the_order_of_sequences_never_matters(order):
    batch = make_batch()
    expected = compute(*batch[:3], weights=batch[3])
    shuffled = [tensor[order] for tensor in batch]
    assert compute(*shuffled[:3], weights=shuffled[3]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs", "log_mass"])
def test_an_unusable_value_is_an_error_that_says_where(name, value):
    old, rollout, mask, _ = make_batch()
    tensors = {
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "log_mass": torch.zeros_like(old),
    }
    tensors[name][3, 0] = value
    with pytest.raises(NonFiniteError, match=rf"{name}\[3, 0\] is -?\w+(\.5)? \(1 in all\)"):
        measure(**tensors, response_mask=mask)


def test_unusable_values_can_be_left_out_and_are_counted():
    old, rollout, mask, _ = make_batch()
    bad = torch.zeros_like(mask, dtype=torch.bool)
    bad[0, 0] = bad[2, 0] = True
    metrics = compute(old, rollout.masked_fill(bad, math.nan), mask, on_invalid="mask")
    expected = compute(old, rollout, mask * ~bad)
    assert metrics.pop("invalid_fraction") == pytest.approx(2 / float(mask.sum()))
    assert expected.pop("invalid_fraction") == 0.0
    assert metrics == expected


def test_missing_or_misshapen_log_probs_are_an_error():
    """vime#70: missing log-probs are never 0.0; a length mismatch is an error."""
    old, rollout, mask, _ = make_batch()
    with pytest.raises(ShapeError, match="rollout_log_probs must be a floating-point tensor, got"):
        measure(old_log_probs=old, rollout_log_probs=None, response_mask=mask)
    with pytest.raises(ShapeError, match=r"rollout_log_probs has shape \(7, 22\), response_mask"):
        measure(old_log_probs=old, rollout_log_probs=rollout[:, :-1], response_mask=mask)
    with pytest.raises(ShapeError, match=r"old_log_probs has shape \(7, 1\)"):
        measure(old_log_probs=old[:, :1], rollout_log_probs=rollout, response_mask=mask)
    with pytest.raises(ShapeError, match=r"response_mask must be a .* tensor, got \(23,\)"):
        measure(old_log_probs=old[0], rollout_log_probs=rollout[0], response_mask=mask[0])
    with pytest.raises(ShapeError, match=r"got torch\.int64"):
        measure(old_log_probs=old.long(), rollout_log_probs=rollout, response_mask=mask)
    with pytest.raises(ShapeError, match="old_log_probs is on meta, response_mask on cpu"):
        measure(old_log_probs=old.to("meta"), rollout_log_probs=rollout, response_mask=mask)


# --- shards


@given(st.integers(0, 100), st.lists(st.integers(0, 7), max_size=4))
def test_sharded_metrics_equal_global_ones(seed, cuts):
    """slime#429: shards of any sizes, added up, give the metrics of the whole."""
    batch = make_batch(seed=seed)
    edges = [0, *sorted(cuts), 7]
    state = MismatchState.empty()
    for start, stop in itertools.pairwise(edges):
        old, rollout, mask, weights = (tensor[start:stop] for tensor in batch)
        state += measure(
            old_log_probs=old, rollout_log_probs=rollout, response_mask=mask, weights=weights
        )
    expected = compute(*batch[:3], weights=batch[3])
    assert state.compute() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3))
def test_adding_states_is_associative_and_commutative(seeds):
    a, b, c = (
        measure(old_log_probs=old, rollout_log_probs=rollout, response_mask=mask)
        for old, rollout, mask, _ in (make_batch(batch=2, seed=seed) for seed in seeds)
    )
    assert ((a + b) + c).compute() == pytest.approx((a + (b + c)).compute(), rel=1e-12)
    assert (a + b).compute() == (b + a).compute()
    assert (a + MismatchState.empty()).compute() == a.compute()


def _one_rank(rank, store, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    rows = slice(0, 2) if rank == 0 else slice(2, 7)
    old, rollout, mask, weights = (tensor[rows] for tensor in make_batch())
    state = measure(
        old_log_probs=old, rollout_log_probs=rollout, response_mask=mask, weights=weights
    )
    before = state.compute()["num_tokens"]
    results[rank] = state.all_reduce().compute()
    assert state.compute()["num_tokens"] == before
    torch.distributed.destroy_process_group()


def test_every_rank_gets_the_metrics_of_all(tmp_path):
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
        assert [rank.exitcode for rank in ranks] == [0, 0]
        expected = compute(*make_batch()[:3], weights=make_batch()[3])
        for metrics in results.values():
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)


@given(
    st.lists(st.floats(-6, 6), min_size=1, max_size=12),
    st.lists(st.floats(0, 5), min_size=12, max_size=12),
)
def test_metrics_stay_in_their_ranges(log_ratios, weights):
    log_ratio = torch.tensor([log_ratios])
    rollout = -log_ratio.abs() - 0.1
    weights = torch.tensor([weights[: len(log_ratios)]])
    metrics = compute(rollout + log_ratio, rollout, torch.ones_like(log_ratio), weights=weights)
    assert 0 < metrics["ess"] <= 1 + 1e-6
    assert 0 <= metrics["weight_ess"] <= 1 + 1e-6
    assert min(metrics[name] for name in ("k2", "k3", "reverse_k3", "js", "prob_diff_mean")) >= 0
    assert metrics["ratio_min"] <= metrics["ratio_p95"] <= metrics["ratio_max"]
    assert metrics["weight_min"] <= metrics["weight_p95"] <= metrics["weight_max"]
    assert metrics["tmpe"] >= 1
