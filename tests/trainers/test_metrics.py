"""Metrics: each against its formula, written out."""

from __future__ import annotations

import math

import pytest
import torch

from flashrl.core.schemes import get_scheme
from flashrl.errors import UnknownNameError
from flashrl.trainers import corrections
from flashrl.trainers.metrics import METRICS, measure_correction, scheme_metrics

# Two responses with these ratios of trainer to rollout; the last position is padding.
RATIOS = [[0.6, 4.0, 1.0], [1.0, 2.0, 9.0]]
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
KEPT = [0.6, 4.0, 1.0, 1.0, 2.0]


def measure(**options: object) -> dict[str, float | str]:
    rollout = torch.full((2, 3), -3.0, dtype=torch.float64)
    old = rollout + torch.tensor(RATIOS, dtype=torch.float64).log()
    _, metrics = measure_correction(
        old_log_probs=old, rollout_log_probs=rollout, response_mask=MASK, **options
    )
    return metrics


def test_metrics_equal_their_formulas() -> None:
    metrics = measure(correction="default")
    mean = sum(KEPT) / 5
    expected = {
        "kl": sum(r - 1 - math.log(r) for r in KEPT) / 5,
        "ess": mean**2 / (sum(r * r for r in KEPT) / 5),
        "ratio_mean": mean,
        "ratio_sd": math.sqrt(sum((r - mean) ** 2 for r in KEPT) / 5),
        "ratio_max": 4.0,
        "frac_truncated": 1 / 5,  # 4 is above C = 2; 2 is not
        "frac_dropped": 0.0,
    }
    assert {name: metrics[f"flashrl/{name}"] for name in expected} == pytest.approx(expected)
    assert 2.0 <= metrics["flashrl/ratio_p95"] <= 4.0
    assert metrics.keys() == {f"flashrl/{name}" for name in METRICS}


def test_a_mask_drops_and_does_not_truncate() -> None:
    metrics = measure(correction="nemo_rl_icepop")
    assert metrics["flashrl/frac_dropped"] == 0.0
    metrics = measure(correction=corrections.find("dppo_tv"))
    assert metrics["flashrl/frac_dropped"] == 0.0  # no advantages, so no mask by their sign
    metrics = measure(correction=corrections.find("dppo_tv"), advantages=torch.tensor([1.0, -1.0]))
    # π - μ of ρ = 4 is 3 e^-3 = 0.149, under 0.2
    assert metrics["flashrl/frac_dropped"] == 0.0
    metrics = measure(correction="skyrl_geometric")
    # geometric means: 2.4^(1/3) and 2^(1/2), both outside [0.99, 1.01]
    assert metrics["flashrl/frac_dropped"] == 1.0


def test_a_nan_is_left_out_of_the_measurement() -> None:
    rollout = torch.tensor([[-1.0, math.nan]])
    _, metrics = measure_correction(
        old_log_probs=torch.tensor([[-1.0, -1.0]]),
        rollout_log_probs=rollout,
        response_mask=torch.ones(1, 2),
    )
    assert metrics["flashrl/kl"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_schemes_are_shares() -> None:
    schemes = [get_scheme(name) for name in ("int8", "int8", "bf16", "fp8")]
    assert scheme_metrics(schemes) == {
        "flashrl/scheme/int8": 0.5,
        "flashrl/scheme/bf16": 0.25,
        "flashrl/scheme/fp8_channel": 0.25,
    }


@pytest.mark.parametrize("name", corrections.names())
def test_every_correction_is_found_by_its_names(name: str) -> None:
    assert corrections.find(name).name == corrections.ALIASES.get(name, name)


def test_an_unknown_correction_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="unknown correction 'tsi'; known: tis, icepop"):
        corrections.find("tsi")
