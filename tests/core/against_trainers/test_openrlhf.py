"""The policy loss of OpenRLHF 0.11, on the same batches."""

import importlib
import importlib.util
import math
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from flashrl.core.correction import CorrectionConfig, get_config
from flashrl.core.correction.rejection import Filter

# What a peer or its dependencies deprecate is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = range(4)


@pytest.fixture(scope="module")
def openrlhf(require_peer):
    """OpenRLHF's loss module, without the actors beside it.

    Its package imports DeepSpeed and FlashAttention for the models.  The loss needs neither, so the
    package's ``__init__`` does not run, and an empty module answers to ``import deepspeed``.
    """
    require_peer("openrlhf")
    origin = importlib.util.find_spec("openrlhf").submodule_search_locations[0]
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [str(Path(origin) / "models")]
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setitem(sys.modules, "openrlhf.models", package)
        if importlib.util.find_spec("deepspeed") is None:
            patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        return importlib.import_module("openrlhf.models.loss")


def openrlhf_loss(openrlhf, batch, **options):
    loss, _, _, kl, filtered = openrlhf.PolicyLoss(**options)(
        batch.log_probs,
        batch.old,
        batch.advantages,
        action_mask=batch.mask,
        rollout_log_probs=batch.rollout,
    )
    return loss, kl, filtered


OPENRLHF = [
    (
        {"level": "token", "mode": "clip", "threshold": (0.0, 1.3)},
        CorrectionConfig(high=1.3),
        "truncated_fraction",
    ),
    (
        {"level": "token", "mode": "clip", "threshold": (0.8, 1.3)},
        CorrectionConfig(low=0.8, high=1.3),
        "truncated_fraction",
    ),
    (
        {"level": "token", "mode": "mask", "threshold": (0.8, 1.3)},
        CorrectionConfig(bound="mask", low=0.8, high=1.3),
        "dropped_fraction",
    ),
    (
        {"level": "seq", "mode": "mask", "threshold": (0.95, 1.05)},
        CorrectionConfig(
            bound="none",
            filters=(Filter(statistic="ratio", over="mean", low=0.95, high=1.05),),
        ),
        "dropped_sequence_fraction",
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("options", "config", "fraction"), OPENRLHF)
@pytest.mark.parametrize("token_level", [True, False])
def test_the_loss_is_that_of_openrlhf(
    openrlhf,
    seed,
    options,
    config,
    fraction,
    token_level,
    make_batch,
    assert_same_loss_and_gradient,
):
    batch = make_batch(seed, batch=24)
    theirs, kl, filtered = openrlhf_loss(
        openrlhf,
        batch,
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        token_level_loss=token_level,
        **{f"is_correction_{name}": value for name, value in options.items()},
    )
    aggregation = "token_mean" if token_level else "seq_mean_token_mean"
    ours = batch.loss(config, aggregation=aggregation, clip_high=0.28)
    assert_same_loss_and_gradient(ours, theirs, batch.log_probs)
    metrics = batch.correct(config).metrics
    assert metrics["k1"] == pytest.approx(kl.item())
    assert 0 < metrics[fraction] < 1
    assert metrics[fraction] == pytest.approx(filtered.item())


def test_the_openrlhf_preset_is_its_default_threshold(openrlhf):
    default = openrlhf.PolicyLoss()
    preset = get_config("openrlhf")
    assert default.is_correction_mode == preset.bound == "mask"
    assert default.is_correction_threshold == (preset.low, preset.high)


def test_a_missing_log_prob_is_no_certainty_as_in_openrlhf(openrlhf, make_batch):
    """Stored as 0.0 it makes ρ = π there, far below 1; here a NaN is dropped, or an error."""
    batch = make_batch(0)
    batch.rollout = batch.old.clone()
    batch.log_probs = batch.old.clone().requires_grad_()
    batch.rollout[0, 0] = 0.0
    options = {"level": "token", "mode": "clip", "threshold": (0.0, 2.0)}
    options = {f"is_correction_{name}": value for name, value in options.items()}
    theirs, _, _ = openrlhf_loss(openrlhf, batch, **options)
    filled = torch.autograd.grad(theirs, batch.log_probs)[0]
    batch.rollout[0, 0] = math.nan
    config = CorrectionConfig(on_invalid="mask")
    dropped = torch.autograd.grad(batch.loss(config), batch.log_probs)[0]
    assert filled[0, 0] != 0.0
    assert dropped[0, 0] == 0.0
    torch.testing.assert_close(dropped[1:], filled[1:])
