"""OpenRLHF's own loss with corrections of ours, against each formula written out."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashrl.core.correction import compute
from flashrl.trainers import corrections, guards
from flashrl.trainers.openrlhf.batch import measure, screen
from flashrl.trainers.openrlhf.loss import corrected
from flashrl.trainers.openrlhf.options import OWN_KEY, write_options

NAMES = [name for name in corrections.names() if name not in ("ais", "off")]


@pytest.fixture(scope="module")
def policy_loss(require_packages: Any) -> Any:
    """OpenRLHF's ``PolicyLoss``, without the models beside it, which want flash-attn."""
    require_packages("openrlhf")
    origin = importlib.util.find_spec("openrlhf").submodule_search_locations[0]  # type: ignore
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [str(Path(origin) / "models")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "openrlhf.models", package)
        if importlib.util.find_spec("deepspeed") is None:
            patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        return importlib.import_module("openrlhf.models.loss").PolicyLoss


class Batch:
    """A ragged batch in float64 whose policy has moved since the sync."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.rollout = -3 * torch.rand(6, 9, generator=generator, dtype=torch.float64) - 1
        self.old = self.rollout + 0.1 * noise(6, 9)
        self.old[0] = self.rollout[0] + 1e-4 * noise(9)  # one that every filter keeps
        self.log_probs = (self.old + 0.3 * noise(6, 9)).requires_grad_()
        self.advantages = noise(6, 9)
        lengths = torch.tensor([9, 3, 5, 9, 1, 7]).unsqueeze(1)
        self.mask = torch.arange(9) < lengths

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.log_probs)
        return gradient


def written_out(batch: Batch, name: str) -> Tensor:
    """The loss of a correction, by its formula, in the mean over tokens."""
    config = corrections.find(name)
    weights, _ = compute(
        old_log_probs=batch.old,
        log_probs=batch.log_probs.detach(),
        rollout_log_probs=batch.rollout,
        response_mask=batch.mask,
        advantages=batch.advantages,
        config=config,
    )
    if config.objective == "policy_gradient":
        losses = -weights * batch.advantages * batch.log_probs
    else:
        reference = batch.old if config.objective == "decoupled" else batch.rollout
        ratio = (batch.log_probs - reference).exp()
        clipped = ratio.clamp(0.8, 1.2)
        losses = -weights * torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return losses[batch.mask].sum() / batch.mask.sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_formula(policy_loss: Any, name: str) -> None:
    """Whether OpenRLHF has the correction or not."""
    batch, options = Batch(), write_options(name)
    own = OWN_KEY in options
    keys = {k.split(".")[-1]: v for k, v in options.items() if k != OWN_KEY}
    module = policy_loss(**keys)
    forward = corrected(policy_loss.forward, corrections.find(name)) if own else policy_loss.forward
    loss, _, _, k1, dropped = forward(
        module,
        batch.log_probs,
        batch.old,
        batch.advantages,
        action_mask=batch.mask,
        rollout_log_probs=batch.rollout,
    )
    gradient = batch.gradient(loss)
    # Weights of ours are float32 in this loss.
    torch.testing.assert_close(
        gradient, batch.gradient(written_out(batch, name)), rtol=1e-5, atol=1e-7
    )
    assert gradient.abs().max() > 0
    assert not gradient[~batch.mask].any()
    assert module.is_correction_level == keys["is_correction_level"]
    assert 0 <= float(dropped) < 1
    expected = (batch.rollout - batch.old)[batch.mask].mean()
    assert float(k1) == pytest.approx(float(expected), abs=1e-6)


class Experience(types.SimpleNamespace):
    """What OpenRLHF's has, of one micro-batch."""

    def __init__(self, old: list[Any], rollout: list[Any] | None, **info: Any) -> None:
        old_log_probs = torch.tensor(old)
        super().__init__(
            sequences=torch.zeros(len(old), 9),
            action_log_probs=old_log_probs,
            rollout_log_probs=None if rollout is None else torch.tensor(rollout),
            action_mask=torch.ones_like(old_log_probs, dtype=torch.bool),
            advantages=torch.ones_like(old_log_probs),
            info={name: torch.tensor(value) for name, value in info.items()},
        )


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_warned", set())


def test_a_batch_is_screened_and_every_unusable_token_counted() -> None:
    """vime#70, OpenRLHF's 0.0: it counts as missing where the trainer finds the token unlikely."""
    first = Experience([[-1.0, -2.0, -1e-4]], [[-1.1, 0.0, 0.0]])
    second = Experience([[-1.0, -1.0]], [[math.nan, -1.0]], **{"flashrl/num_unusable": [2.0]})
    assert screen([first, second]) == 1 + 1 + 2
    assert first.action_mask.tolist() == [[True, False, True]]
    assert second.action_mask.tolist() == [[False, True]]
    assert second.rollout_log_probs.isfinite().all()
    assert first.advantages.tolist() == [[1.0, 1.0, 1.0]]


def test_a_batch_without_a_usable_token_has_no_gradient(policy_loss: Any) -> None:
    """verl#3984: loss 0, gradient 0, finite."""
    experience = Experience([[-1.0, -2.0]], [[math.nan, -math.inf]])
    assert screen([experience]) == 2
    log_probs = experience.action_log_probs.clone().requires_grad_()
    loss, *_ = policy_loss(is_correction_level="token")(
        log_probs,
        experience.action_log_probs,
        experience.advantages,
        action_mask=experience.action_mask,
        rollout_log_probs=experience.rollout_log_probs,
    )
    loss.backward()
    assert float(loss) == 0.0
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.0, 0.0]]


def test_metrics_are_of_all_experiences_whatever_their_width() -> None:
    narrow = Experience([[-1.0, -1.0]], [[-1.0, -1.0 - math.log(3)]])
    wide = Experience([[-1.0, -1.0, -1.0]], [[-1.0, -1.0, -1.0 - math.log(2)]])
    section = types.SimpleNamespace(
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_gating="ratio",
        is_correction_threshold=[0.0, 2.5],
    )
    args = types.SimpleNamespace(
        algo=types.SimpleNamespace(advantage=section),
        actor=types.SimpleNamespace(policy_loss_type="ppo"),
    )
    metrics = measure([narrow, wide], args)
    # Ratios 1, 3, 1, 1, 2.
    assert metrics["flashrl/ratio_mean"] == pytest.approx(8 / 5)
    assert metrics["flashrl/ratio_max"] == pytest.approx(3.0, rel=1e-5)
    assert metrics["flashrl/frac_truncated"] == pytest.approx(1 / 5)
