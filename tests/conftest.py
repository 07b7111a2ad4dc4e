"""Shared set-up: property tests draw the same examples unless a profile says otherwise."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# No test may ask a model hub for anything, or tell it anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile(
    "default",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=400)
# The models are tiny: more threads only wait for each other.
torch.set_num_threads(1)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, so order does not matter."""
    torch.manual_seed(0)
