"""TRL's trainer with its own vLLM in 8 bit: three runs, and what they left behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashrl.core.schemes import get_scheme
from flashrl.trainers.metrics import METRICS

NUM_STEPS = 5
RUNS = {"int8": "int8_run", "fp8_channel": "fp8_run", "bf16": "bf16_run"}
# vLLM fuses q, k, v and gate, up; o and down stay: seven linears in four matrices.
MATRICES = {
    f"model.layers.{layer}.{part}_proj.weight"
    for layer in range(2)
    for part in ("self_attn.qkv", "self_attn.o", "mlp.gate_up", "mlp.down")
}


@pytest.fixture(params=list(RUNS))
def case(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A scheme, and the run whose engine has it."""
    return request.param, request.getfixturevalue(RUNS[request.param])


def dtype_of(scheme: str) -> torch.dtype:
    return torch.bfloat16 if scheme == "bf16" else get_scheme(scheme).dtype


def mask_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def ratios(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """π / μ of each token that counts."""
    old, rollout = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
    return (old.double() - rollout.double())[mask_of(batch)].exp()


def test_every_sync_quantizes_every_linear(case: tuple[str, Any]) -> None:
    scheme, run = case
    engines = run.engines()
    assert len(engines) == NUM_STEPS
    for engine in engines:
        scales = {name for name in engine if name.endswith("_scale")}
        assert scales == ({f"{name}_scale" for name in MATRICES} if scheme != "bf16" else set())
        for name in MATRICES:
            assert engine[name].dtype == dtype_of(scheme)
    for before, after in itertools.pairwise(engines):
        assert all(not torch.equal(before[name], after[name]) for name in MATRICES)


def test_after_every_sync_vllm_holds_the_trainers_weights(
    case: tuple[str, Any], held_by_vllm: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """Bit for bit, against the trainer's own checkpoints; FP32 weights are rounded once."""
    scheme, run = case
    for step, engine in enumerate(run.engines()):
        wanted = held_by_vllm(run.saved(step), scheme)
        assert wanted.keys() == engine.keys()
        for name, tensor in wanted.items():
            # vLLM pads the vocabulary to a multiple of 64.
            found = engine[name][: len(tensor)]
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), (step, name)


def test_the_mismatch_is_small_and_finite(case: tuple[str, Any]) -> None:
    _, run = case
    for batch in run.losses():
        ratio = ratios(batch)
        assert ratio.isfinite().all()
        assert ratio.mean() == pytest.approx(1.0, abs=0.05)
        assert ratio.numel() > 64
        assert ratio.std() > 1e-3
        assert batch["loss"].isfinite().all()
    assert all(map(math.isfinite, run.scalars("grad_norm")))


def test_metrics_are_those_of_the_batch(case: tuple[str, Any]) -> None:
    """Against the tokens that the loss got, in float64."""
    scheme, run = case
    logged = {name: run.scalars(f"flashrl/{name}") for name in METRICS}
    for step, batch in enumerate(run.losses()):
        ratio = ratios(batch)
        expected = {
            "kl": float((ratio - 1 - ratio.log()).mean()),
            "ess": float(ratio.mean() ** 2 / ratio.square().mean()),
            "ratio_mean": float(ratio.mean()),
            "ratio_sd": float(ratio.std(unbiased=False)),
            "ratio_max": float(ratio.max()),
        }
        for name, value in expected.items():
            assert logged[name][step] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert run.scalars(f"flashrl/scheme/{scheme}") == [1.0] * NUM_STEPS
    assert run.scalars("flashrl/version_lag") == [0.0] * NUM_STEPS
    assert all(value > 0 for value in run.scalars("flashrl/update_ms"))
    assert len(run.scalars("flashrl/update_ms")) == NUM_STEPS


def test_a_native_correction_is_trls_own(fp8_run: Any) -> None:
    """IcePop is a token mask in [0.5, 5]."""
    frac_dropped = fp8_run.scalars("flashrl/frac_dropped")
    means = fp8_run.scalars("sampling/importance_sampling_ratio/mean")
    for step, batch in enumerate(fp8_run.losses()):
        mask = mask_of(batch)
        ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()[mask]
        kept = torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)
        torch.testing.assert_close(batch["importance_sampling_ratio"][mask], kept)
        assert means[step] == pytest.approx(float(kept.mean()), rel=1e-5)
        dropped = (kept == 0).double().mean()
        assert frac_dropped[step] == pytest.approx(float(dropped), abs=1e-6)


def test_a_correction_that_trl_lacks_is_in_the_advantages(bf16_run: Any) -> None:
    """Sequences whose geometric mean ratio leaves [0.99, 1.01] have no advantage left."""
    for batch, frac_dropped in zip(
        bf16_run.losses(), bf16_run.scalars("flashrl/frac_dropped"), strict=True
    ):
        mask = mask_of(batch)
        old, rollout = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        geometric = (((old - rollout) * mask).sum(-1) / mask.sum(-1)).exp()
        inside = (geometric >= 0.99) & (geometric <= 1.01)
        advantages = batch["advantages"]
        assert advantages.shape == mask.shape
        assert not advantages[~inside].any()
        assert advantages[inside].any() or not inside.any()
        dropped = mask[~inside].sum() / mask.sum()
        assert frac_dropped == pytest.approx(float(dropped), abs=1e-6)
        assert "importance_sampling_ratio" not in batch


def test_a_token_without_a_log_probability_is_not_trained_on(int8_run: Any) -> None:
    """TRL alone takes it for a ratio of 1; the NaN is vLLM's, as in TRL#4159's kind."""
    assert int8_run.scalars("flashrl/num_unusable") == [0.0, 1.0, 0.0, 0.0, 0.0]
    masked = [batch["tool_mask"] for batch in int8_run.losses() if "tool_mask" in batch]
    assert len(masked) == 1
    assert (masked[0] == 0).nonzero().tolist()[0][1] == 2
    assert int((masked[0] == 0).sum()) == 1
    assert "are missing: 1 of" in int8_run.log


def test_nothing_is_warned_of_in_a_good_run(fp8_run: Any) -> None:
    assert "WARNING flashrl" not in fp8_run.log
