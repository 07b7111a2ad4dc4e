"""Corrections in verl's own functions, on verl's own configuration, against the core's weights."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from flashrl.core.config import Config
from flashrl.core.correction import compute
from flashrl.core.correction.losses import policy_loss
from flashrl.core.launchers import HydraSyntax
from flashrl.errors import ConfigError
from flashrl.trainers import corrections, guards
from flashrl.trainers.verl.options import OWN_KEY, is_on, read_options, write_options

from .batches import Batch, configure

DECOUPLED = [n for n in corrections.names() if corrections.find(n).objective == "decoupled"]


@pytest.fixture(autouse=True)
def _fresh(require_packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages("verl", "hydra", "transfer_queue")
    monkeypatch.setattr(guards, "_warned", set())


@pytest.fixture
def correct() -> Any:
    """verl's correction, guarded."""
    from verl.trainer.ppo import rollout_corr_helper

    from flashrl.trainers.verl.correction import guarded

    function = rollout_corr_helper.compute_rollout_correction_and_add_to_batch
    return guarded(getattr(function, "__wrapped__", function))


def configure_correction(name: str) -> Any:
    return configure(*HydraSyntax().write(write_options(name)))


@pytest.mark.parametrize("name", DECOUPLED)
def test_every_decoupled_correction_gives_the_cores_weights(name: str, correct: Any) -> None:
    batch = Batch()
    corrected, metrics = correct(
        batch.proto(), configure_correction(name).algorithm.rollout_correction
    )
    expected = compute(
        old_log_probs=batch.old,
        rollout_log_probs=batch.rollout,
        response_mask=batch.mask,
        config=corrections.find(name),
    )
    weights = corrected.batch.get("rollout_is_weights", None)
    if weights is None:
        weights = batch.mask.float()
    torch.testing.assert_close(weights, expected.weights)
    assert torch.equal(corrected.batch["response_mask"], batch.mask)
    assert metrics["flashrl/frac_truncated"] == pytest.approx(
        expected.metrics["truncated_fraction"]
    )
    assert metrics["flashrl/frac_dropped"] == pytest.approx(expected.metrics["dropped_fraction"])


@pytest.mark.parametrize("name", ["bypass", "dppo_tv"])
def test_corrections_against_the_rollout_give_the_cores_gradient(name: str) -> None:
    """In bypass mode verl's old policy is the rollout's.

    Its PPO also bounds the loss of tokens with A < 0 (dual clip), whatever the correction is.
    """
    batch = Batch()
    arguments = HydraSyntax().write(write_options(name))
    actor = configure("actor_rollout_ref.actor.clip_ratio_c=1e9", *arguments)
    tensors = {"old_log_probs": batch.rollout, "response_mask": batch.mask}
    mode = actor.actor_rollout_ref.actor.policy_loss.loss_mode
    _, theirs = batch.loss_and_gradient(tensors, mode=mode, actor=actor)
    config = corrections.find(name)
    weights = compute(
        log_probs=batch.log_probs,
        rollout_log_probs=batch.rollout,
        response_mask=batch.mask,
        advantages=batch.advantages,
        config=config,
    ).weights
    loss = policy_loss(
        batch.log_probs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        weights=weights,
        rollout_log_probs=batch.rollout,
        config=config,
    )
    ours = torch.autograd.grad(loss, batch.log_probs)[0]
    assert ours.any()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("rejection", "thresholds"),
    [
        ("token_k1", "0.9_1.5"),
        ("token_k2", "0.1"),
        ("seq_mean_k1", "1.1"),
        ("seq_sum_k1", "0.5_3.0"),
        ("seq_max_k3", "0.3"),
        ("token_k3,seq_mean_k2", "0.5,0.2"),
    ],
)
def test_rejections_of_verl_are_measured_as_verl_does_them(
    rejection: str, thresholds: str, correct: Any
) -> None:
    batch = Batch()
    arguments = [f"rollout_rs='{rejection}'", f"rollout_rs_threshold='{thresholds}'"]
    config = configure(*(f"algorithm.rollout_correction.{a}" for a in arguments))
    corrected, metrics = correct(batch.proto(), config.algorithm.rollout_correction)
    kept = corrected.batch["response_mask"].sum() / batch.mask.sum()
    assert 0 < kept < 1
    assert metrics["flashrl/frac_dropped"] == pytest.approx(1 - float(kept))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, 0.7])
@pytest.mark.parametrize("name", ["tis", "trl", "off", "ais"])
def test_an_unusable_token_costs_the_step_that_token_only(
    name: str, bad: float, correct: Any
) -> None:
    """The gradient is finite, and that of the batch in which the token is masked by hand."""
    section = configure_correction(name).algorithm.rollout_correction
    spoiled, masked = Batch(), Batch()
    spoiled.rollout[2, 0] = bad
    masked.mask[2, 0] = 0
    got, metrics = correct(spoiled.proto(), section)
    want, _ = correct(masked.proto(), section)
    gradient = spoiled.loss_and_gradient(got.batch)[1]
    torch.testing.assert_close(gradient, masked.loss_and_gradient(want.batch)[1])
    assert gradient.isfinite().all()
    assert gradient.any()
    assert metrics["flashrl/num_unusable"] == 1


@pytest.mark.parametrize("name", ["tis", "off", "ais"])
def test_a_batch_without_a_usable_token_gives_no_gradient(name: str, correct: Any) -> None:
    """verl#3984: loss 0, gradient 0, finite, flagged."""
    batch = Batch()
    batch.rollout[:] = math.nan
    corrected, metrics = correct(
        batch.proto(), configure_correction(name).algorithm.rollout_correction
    )
    loss, gradient = batch.loss_and_gradient(corrected.batch)
    assert loss.item() == 0.0
    assert not gradient.any()
    assert metrics["flashrl/num_unusable"] == batch.mask.sum()


def test_a_response_without_a_usable_token_empties_no_mini_batch(correct: Any) -> None:
    batch = Batch()
    batch.rollout[3] = math.nan
    corrected, _ = correct(batch.proto(), configure_correction("tis").algorithm.rollout_correction)
    assert torch.equal(corrected.batch["response_mask"][3], batch.mask[3])
    gradient = batch.loss_and_gradient(corrected.batch)[1]
    assert not gradient[3].any()
    assert gradient[2].any()


def test_a_batch_that_verl_rejects_whole_gives_no_gradient(correct: Any) -> None:
    """verl#3984."""
    batch = Batch()
    arguments = ["rollout_rs=token_k3", "rollout_rs_threshold=1e-12"]
    config = configure(*(f"algorithm.rollout_correction.{a}" for a in arguments))
    corrected, metrics = correct(batch.proto(), config.algorithm.rollout_correction)
    loss, gradient = batch.loss_and_gradient(corrected.batch)
    assert loss.item() == 0.0
    assert not gradient.any()
    assert metrics["flashrl/frac_dropped"] == 1.0


class TestPreparation:
    """What a trainer's configuration is turned into, or warned about."""

    @pytest.fixture(autouse=True)
    def _prepare(self) -> None:
        from flashrl.trainers.verl.trainer import prepare

        self.prepare = prepare

    def test_log_probs_are_turned_on(self, caplog: pytest.LogCaptureFixture) -> None:
        config = configure("actor_rollout_ref.rollout.calculate_log_probs=False")
        self.prepare(config, Config.from_yaml("configs: [{fn: bf16}]"))
        assert config.actor_rollout_ref.rollout.calculate_log_probs
        assert "calculate_log_probs is turned on" in caplog.text

    @pytest.mark.parametrize(("scheme", "warned"), [("int8", True), ("bf16", False)])
    def test_quantized_rollouts_without_a_correction_are_warned_of(
        self, scheme: str, warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.prepare(configure(), Config.from_yaml(f"configs: [{{fn: {scheme}}}]"))
        assert ("turn it on with algorithm.rollout_correction" in caplog.text) is warned

    def test_a_correction_in_the_configuration_is_put_in(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = configure()
        self.prepare(config, Config.from_yaml("configs: [{fn: int8, correction: flashrl_c8}]"))
        assert config.algorithm.rollout_correction.rollout_is == "token"
        assert config.algorithm.rollout_correction.rollout_is_threshold == 8.0
        assert "the correction is off" not in caplog.text

    def test_the_scripts_own_correction_stands(self) -> None:
        config = configure("algorithm.rollout_correction.rollout_is=sequence")
        self.prepare(config, Config.from_yaml("configs: [{fn: int8, correction: ais}]"))
        assert config.algorithm.rollout_correction.rollout_is == "sequence"
        assert OWN_KEY not in config.algorithm.rollout_correction

    @pytest.mark.parametrize(
        ("arguments", "warned"),
        [
            (["bypass_mode=true", "loss_type=reinforce", "rollout_is=token"], True),
            (["bypass_mode=true"], False),
            (["rollout_is=token"], False),
        ],
    )
    def test_options_that_bypass_mode_ignores_are_named(
        self, arguments: list[str], warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = configure(*(f"algorithm.rollout_correction.{a}" for a in arguments))
        self.prepare(config, Config.from_yaml("configs: [{fn: int8}]"))
        assert ("ignores loss_type=reinforce, rollout_is=token" in caplog.text) is warned

    def test_one_loss_has_one_correction(self) -> None:
        text = "configs: [{fn: int8, correction: ais}, {fn: bf16, correction: 'off'}]"
        with pytest.raises(ConfigError, match="several corrections"):
            self.prepare(configure(), Config.from_yaml(text))


@pytest.mark.parametrize("name", corrections.names())
def test_a_correction_is_on_unless_it_is_off(name: str) -> None:
    section = configure_correction(name).algorithm.rollout_correction
    assert is_on(section) is (name != "off")


def test_verls_default_is_off_and_measures_plain_ratios() -> None:
    section = configure().algorithm.rollout_correction
    assert not is_on(section)
    assert read_options(section).level == "none"
    assert read_options({"rollout_is": "token", "rollout_is_threshold": None}).level == "none"


def test_the_warnings_come_from_the_librarys_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flashrl"):
        guards.check_correction(
            [entry.quant_scheme for entry in Config.from_yaml("configs: [{fn: fp8}]").entries],
            corrected=False,
            remedy="x",
        )
    assert caplog.records[0].name.startswith("flashrl.")
