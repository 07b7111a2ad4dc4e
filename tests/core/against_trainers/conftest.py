"""Differential tests: the same random ragged batches through verl, TRL and OpenRLHF.

Their own code runs, installed and unchanged.  Where this library differs on purpose, a test says
why.  A peer that is not installed skips its tests, or fails them if FLASHRL_REQUIRE_PEERS is set.
"""

import importlib.util
import os

import pytest
import torch

from flashrl.core.correction import compute
from flashrl.core.correction.losses import policy_loss


def require(name):
    if importlib.util.find_spec(name) is None:
        message = f"{name} is not installed"
        if os.environ.get("FLASHRL_REQUIRE_PEERS"):
            pytest.fail(message)
        pytest.skip(message)


class Batch:
    """A ragged batch whose current policy has moved since the sync."""

    def __init__(self, seed, batch=9, length=17, spread=0.4):
        generator = torch.Generator().manual_seed(seed)

        def noise():
            return torch.randn(batch, length, generator=generator, dtype=torch.float64)

        self.rollout = -3 * torch.rand(batch, length, generator=generator, dtype=torch.float64) - 2
        self.old = self.rollout + spread * noise()
        self.log_probs = (self.old + 0.3 * noise()).requires_grad_()
        self.advantages = noise()
        lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
        self.mask = (torch.arange(length) < lengths).double()

    def correct(self, config):
        return compute(
            old_log_probs=self.old,
            log_probs=self.log_probs,
            rollout_log_probs=self.rollout,
            response_mask=self.mask,
            advantages=self.advantages,
            config=config,
        )

    def loss(self, config, weights=None, **options):
        return policy_loss(
            self.log_probs,
            advantages=self.advantages,
            response_mask=self.mask,
            weights=self.correct(config).weights if weights is None else weights,
            old_log_probs=self.old,
            rollout_log_probs=self.rollout,
            config=config,
            **options,
        )


@pytest.fixture(scope="session")
def require_peer():
    """Skip, or fail, if the named package is not there."""
    return require


@pytest.fixture
def make_batch():
    """A ragged batch from a seed."""
    return Batch


@pytest.fixture
def assert_same_loss_and_gradient():
    """Compare two losses, and their gradients by the current log-probabilities."""

    def check(ours, theirs, log_probs):
        torch.testing.assert_close(ours, theirs, check_dtype=False)
        gradients = [
            torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss in (ours, theirs)
        ]
        assert gradients[0].any()
        torch.testing.assert_close(*gradients)

    return check
