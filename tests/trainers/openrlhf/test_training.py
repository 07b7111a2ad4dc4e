"""OpenRLHF's trainer, unchanged, with rollouts in 8 bit: three runs, and what they left behind."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashrl.core.schemes import get_scheme
from flashrl.trainers.metrics import METRICS

NUM_STEPS = 4
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


def ratios(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """π / μ of each token that counts."""
    log_ratio = batch["old_log_probs"].double() - batch["rollout_log_probs"].double()
    return log_ratio[batch["action_mask"].bool()].exp()


def steps(run: Any) -> list[torch.Tensor]:
    """The ratios of each step's whole batch, from what the loss got of it."""
    parts = [ratios(batch) for batch in run.losses()]
    num_parts = len(parts) // NUM_STEPS
    return [torch.cat(parts[i * num_parts : (i + 1) * num_parts]) for i in range(NUM_STEPS)]


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


def test_after_every_sync_the_engine_holds_the_trainers_weights(
    case: tuple[str, Any], held_by_vllm: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """Bit for bit, against the trainer's own checkpoints, which never went through a sync."""
    scheme, run = case
    for step, engine in enumerate(run.engines(), start=1):
        wanted = held_by_vllm(run.saved(step), scheme)
        assert wanted.keys() == engine.keys()
        for name, tensor in wanted.items():
            # vLLM pads the vocabulary to a multiple of 64.
            found = engine[name][: len(tensor)]
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), (step, name)


def test_the_mismatch_is_small_and_finite(case: tuple[str, Any]) -> None:
    _, run = case
    for ratio in steps(run):
        assert ratio.isfinite().all()
        assert ratio.mean() == pytest.approx(1.0, abs=0.05)
        assert ratio.numel() > 64
        assert ratio.std() > 1e-3
    assert all(map(math.isfinite, run.scalars("actor_grad_norm")))
    assert all(batch["loss"].isfinite().all() for batch in run.losses())


@pytest.mark.parametrize("run", ["fp8_run", "bf16_run"])
def test_metrics_are_those_of_the_whole_batch(run: str, request: pytest.FixtureRequest) -> None:
    """Against the tokens that the loss got, in float64."""
    finished = request.getfixturevalue(run)
    logged = {name: finished.scalars(f"flashrl/{name}") for name in METRICS}
    for step, ratio in enumerate(steps(finished)):
        expected = {
            "kl": float((ratio - 1 - ratio.log()).mean()),
            "ess": float(ratio.mean() ** 2 / ratio.square().mean()),
            "ratio_mean": float(ratio.mean()),
            "ratio_sd": float(ratio.std(unbiased=False)),
            "ratio_max": float(ratio.max()),
        }
        for name, value in expected.items():
            assert logged[name][step] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert finished.scalars("flashrl/num_unusable") == [0.0] * NUM_STEPS
    assert finished.scalars("flashrl/version_lag") == [0.0] * NUM_STEPS
    # The first batch is trained on before there was a sync.
    assert len(finished.scalars("flashrl/update_ms")) == NUM_STEPS - 1
    assert all(value > 0 for value in finished.scalars("flashrl/update_ms"))


def test_the_scheme_is_in_the_log(fp8_run: Any, bf16_run: Any) -> None:
    assert fp8_run.scalars("flashrl/scheme/fp8_channel") == [1.0] * NUM_STEPS
    assert bf16_run.scalars("flashrl/scheme/bf16") == [1.0] * NUM_STEPS


def test_a_native_correction_is_openrlhfs_own(fp8_run: Any) -> None:
    """IcePop is a token mask in [0.5, 5] there, and its own metrics are filled."""
    num_tokens = sum(batch["action_mask"].sum() for batch in fp8_run.losses())
    k1 = sum(
        ((batch["rollout_log_probs"] - batch["old_log_probs"]) * batch["action_mask"]).sum()
        for batch in fp8_run.losses()
    )
    assert sum(fp8_run.scalars("vllm_kl")) / NUM_STEPS == pytest.approx(
        float(k1 / num_tokens), abs=2e-3
    )
    assert fp8_run.scalars("is_filter_ratio") == fp8_run.scalars("flashrl/frac_dropped")


def test_a_correction_that_openrlhf_lacks_is_in_the_loss(bf16_run: Any) -> None:
    """Sequences whose geometric mean ratio leaves [0.99, 1.01] have no advantage left."""
    kept = []
    for batch in bf16_run.losses():
        mask = batch["action_mask"]
        log_ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]) * mask
        geometric = (log_ratio.sum(-1) / mask.sum(-1)).exp()
        inside = (geometric >= 0.99) & (geometric <= 1.01)
        has_advantage = (batch["advantages"] * mask).abs().sum(-1) > 0
        assert not has_advantage[~inside].any()
        kept += inside.tolist()
    dropped = 1 - sum(kept) / len(kept)
    assert sum(bf16_run.scalars("flashrl/frac_dropped")) / NUM_STEPS == pytest.approx(
        dropped, abs=0.05
    )


def test_a_missing_log_probability_is_masked_and_named(int8_run: Any) -> None:
    """vime#70: OpenRLHF's executor stores 0.0 for it, as if the token had been certain."""
    gaps = []
    for batch in int8_run.losses():
        mask = batch["action_mask"].bool()
        assert (batch["rollout_log_probs"][mask] < 0).all()
        for row in mask:
            (inside,) = row.nonzero(as_tuple=True)
            gaps += [int(i) for i in range(inside[0], inside[-1]) if not row[i]]
    assert len(gaps) == 1
    assert "missing or not finite: 1 of 16 tokens" in int8_run.log
    assert sum(int8_run.scalars("flashrl/num_unusable")) == pytest.approx(1 / 8)


def test_linears_leave_the_trainer_in_8_bit_if_asked(fp8_run: Any, bf16_run: Any) -> None:
    """OpenRLHF's worker prints what it receives: here bytes of values and of a scale a row."""
    found = re.findall(
        r"update weight: flashrl-packed:(\d+)x(\d+):\S+_proj\.weight, dtype: torch\.bfloat16, "
        r"shape: \[(\d+)\]",
        fp8_run.log,
    )
    assert len(found) == 7 * 2 * NUM_STEPS
    for rows, columns, length in (map(int, sizes) for sizes in found):
        assert 2 * length == rows * columns + 4 * rows
    assert "flashrl-packed" not in bf16_run.log
