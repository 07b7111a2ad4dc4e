"""verl's trainer, unchanged, with rollouts in 8 bit: what its runs left behind."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from flashrl.core.quantize import quantize_into
from flashrl.core.schemes import get_scheme
from flashrl.trainers.metrics import METRICS

# q, k, v, o, gate, up and down of two layers.
LINEARS = {
    f"model.layers.{layer}.{part}_proj.weight"
    for layer in range(2)
    for part in (*(f"self_attn.{p}" for p in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
}
# Each with a replica of it, and the scheme of that.
CASES = {
    "int8": ("int8_run", 0, "int8"),
    "fp8_channel": ("hybrid_run", 0, "fp8_channel"),
    "bf16": ("hybrid_run", 1, "bf16"),
    "sglang, int8": ("sglang_run", 0, "int8"),
    "sglang, bf16": ("sglang_run", 1, "bf16"),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[Any, int, str]:
    """A run, a replica in it, and the scheme of that."""
    run, replica, scheme = CASES[request.param]
    return request.getfixturevalue(run), replica, scheme


@pytest.fixture(params=["int8_run", "hybrid_run", "sglang_run"])
def run(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_every_sync_quantizes_every_linear(case: tuple[Any, int, str]) -> None:
    run, replica, scheme = case
    engines = run.engines(replica)
    assert len(engines) == run.num_steps + 1  # one sync before the first step
    for engine in engines:
        quantized = {n for n in LINEARS if engine.stored[n].dtype == get_scheme(scheme).dtype}
        assert quantized == engine.scales.keys() == (LINEARS if scheme != "bf16" else set())
    for before, after in itertools.pairwise(engines):
        changed = {n for n in LINEARS if not same(before.stored[n], after.stored[n])}
        assert changed == LINEARS


def test_after_every_sync_the_engine_holds_the_trainers_weights(
    case: tuple[Any, int, str],
) -> None:
    """Against the trainer's own checkpoints, whose weights never went through a sync."""
    run, replica, scheme = case
    for step, engine in enumerate(run.engines(replica)):
        saved = run.trainer_weights(step)
        assert saved.keys() == engine.stored.keys()
        for name, tensor in saved.items():
            if name not in engine.scales:
                assert torch.equal(engine.stored[name], tensor.to(torch.bfloat16)), (step, name)
                continue
            chosen = get_scheme(scheme)
            quantized = torch.empty(tensor.shape, dtype=chosen.dtype)
            scale = torch.empty(chosen.scale_shape(tensor.shape))
            quantize_into(tensor, quantized, scale, scheme=chosen)
            assert torch.equal(engine.scales[name], scale), (step, name)
            assert same(engine.stored[name], quantized), (step, name)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; torch cannot compare FP8."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", ["int8_run", "sglang_run"])
def test_linear_weights_travel_in_8_bit_if_asked(name: str, request: pytest.FixtureRequest) -> None:
    """A quarter of FP32; what the engine holds is the same bits, as for any other sync."""
    run = request.getfixturevalue(name)
    for sync in run.received(0):
        scales = {f"{name}_scale" for name in LINEARS}
        assert sync.keys() == run.trainer_weights(0).keys() | scales
        assert {n for n, (dtype, _) in sync.items() if dtype == "torch.int8"} == LINEARS
        num_bytes = sum(num_bytes for name, (_, num_bytes) in sync.items() if name in LINEARS)
        assert num_bytes == sum(run.trainer_weights(0)[name].numel() for name in LINEARS)


@pytest.mark.parametrize(("name", "replicas"), [("hybrid_run", (0, 1)), ("sglang_run", (1,))])
def test_weights_travel_as_the_trainer_holds_them_otherwise(
    name: str, replicas: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """Where nobody asks for 8 bit, and where the replica is not quantized."""
    run = request.getfixturevalue(name)
    for replica in replicas:
        for sync in run.received(replica):
            assert sync.keys() == run.trainer_weights(0).keys()
            assert {dtype for dtype, _ in sync.values()} == {"torch.float32"}


def test_the_mismatch_is_small_finite_and_in_both_logs(run: Any) -> None:
    for name in (*METRICS, "num_unusable", "update_ms", "version_lag"):
        values = run.scalars(f"flashrl/{name}")
        assert len(values) == run.num_steps
        assert all(map(math.isfinite, values))
        assert run.console(f"flashrl/{name}") == pytest.approx(values, rel=1e-5, abs=1e-9)
    assert run.scalars("flashrl/ratio_mean") == pytest.approx([1.0] * run.num_steps, abs=0.05)
    assert all(0 < value < 0.05 for value in run.scalars("flashrl/kl"))
    assert all(value > 0 for value in run.scalars("flashrl/update_ms"))
    assert run.scalars("flashrl/version_lag") == [0.0] * run.num_steps
    assert all(map(math.isfinite, run.scalars("actor/grad_norm")))


def test_metrics_beside_sglang_stand_in_wandb_too(sglang_run: Any) -> None:
    for name in (*METRICS, "num_unusable", "update_ms", "version_lag"):
        assert sglang_run.count_in_wandb(f"flashrl/{name}") >= sglang_run.num_steps


def test_metrics_equal_what_verl_measures_itself(int8_run: Any) -> None:
    for ours, verls in (("kl", "k3_kl"), ("ess", "rollout_is_eff_sample_size")):
        assert int8_run.scalars(f"flashrl/{ours}") == pytest.approx(
            int8_run.scalars(f"rollout_corr/{verls}"), rel=1e-2, abs=1e-5
        )
    assert int8_run.scalars("flashrl/num_unusable") == [0.0] * int8_run.num_steps
    assert int8_run.scalars("flashrl/scheme/int8") == [1.0] * int8_run.num_steps


@pytest.mark.parametrize(
    ("name", "schemes"),
    [("hybrid_run", ("fp8_channel", "bf16")), ("sglang_run", ("int8", "bf16"))],
)
def test_replicas_generate_in_schemes_of_their_own(
    name: str, schemes: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(name)
    for scheme in schemes:
        assert run.scalars(f"flashrl/scheme/{scheme}") == [0.5] * run.num_steps


def test_a_step_survives_a_nan(hybrid_run: Any) -> None:
    """verl multiplies a NaN by a weight of 0, which is NaN in the gradient."""
    assert hybrid_run.scalars("flashrl/num_unusable") == [0.0, 2.0, 0.0, 0.0]  # one a replica
    assert hybrid_run.log.count("log-probabilities are missing: 2 of") == 1


def test_a_correction_that_verl_lacks_is_used(hybrid_run: Any) -> None:
    """Adaptive importance sampling weighs little at a small mismatch; verl itself measures none."""
    assert "rollout_corr/rollout_is_mean" not in hybrid_run.log
    assert hybrid_run.console("flashrl/ess") == pytest.approx([1.0] * 4, abs=0.05)


def test_bypass_mode_measures_the_policy_that_trains(bypass_run: Any) -> None:
    """verl#4070; slime#429: over micro-batches and ranks, against what each loss was given."""
    for step in (1, 3):
        parts = bypass_run.losses(step)
        assert len(parts) == 4
        masks = [part["response_mask"] == 1 for part in parts]
        log_ratio = torch.cat(
            [
                (part["log_probs"].double() - part["old_log_probs"].double())[mask]
                for part, mask in zip(parts, masks, strict=True)
            ]
        )
        ratio = log_ratio.exp()
        expected = {
            "kl": (ratio - 1 - log_ratio).mean(),
            "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
            "ratio_mean": ratio.mean(),
            "ratio_sd": ratio.std(correction=0),
            "ratio_p95": ratio.quantile(0.95, interpolation="higher"),
            "ratio_max": ratio.max(),
        }
        for name, value in expected.items():
            logged = bypass_run.scalars(f"flashrl/{name}")[step - 1]
            assert logged == pytest.approx(float(value), rel=2e-3, abs=1e-7), name


def test_bypass_mode_survives_a_batch_without_a_usable_token(bypass_run: Any) -> None:
    """verl#3984: loss 0, gradient 0, finite, flagged; and the next step trains."""
    num_tokens = sum(int(part["response_mask"].sum()) for part in bypass_run.losses(2))
    assert bypass_run.scalars("flashrl/num_unusable") == [0.0, num_tokens, 0.0]
    for name in ("pg_loss", "grad_norm"):
        values = bypass_run.scalars(f"actor/{name}")
        assert [value == 0.0 for value in values] == [False, True, False]
        assert all(map(math.isfinite, values))
