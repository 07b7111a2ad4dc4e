"""What a profile holds, counted by hand; and every way in which two can differ."""

from __future__ import annotations

import json

import attrs
import pytest
import torch

from flashrl.core.profiles import Profile
from flashrl.core.profiles.summary import compare_profiles, summarize_profile

NORM, UP, GATE, DOWN = "norm.weight", "up_proj.weight", "gate_proj.weight", "down_proj.weight"


@pytest.fixture
def profile() -> Profile:
    return Profile(
        scheme="int8",
        smoothing={NORM: torch.tensor([0.5, 3.0, 1.0])},
        groups={NORM: [UP, GATE]},
        scales={UP: torch.ones(2, 1)},
        weights=[UP, GATE],
        base_model="base",
        alpha=0.5,
    )


def test_the_summary_is_plain_and_says_all(profile: Profile) -> None:
    assert json.loads(json.dumps(summarize_profile(profile))) == {
        "scheme": "int8",
        "base_model": "base",
        "quantized_model": "",
        "alpha": 0.5,
        "norm_offset": 0.0,
        "num_weights": 2,
        "num_static_scales": 1,
        "num_smoothed": 1,
        "smoothing": {
            NORM: {
                "channels": 3,
                "smallest": 0.5,
                "median": 1.0,
                "largest": 3.0,
                "readers": [UP, GATE],
            }
        },
    }


def test_where_a_profile_came_from_is_no_difference(profile: Profile) -> None:
    other = attrs.evolve(profile, base_model="elsewhere", quantized_model="copy", alpha=None)
    assert compare_profiles(profile, other) == ()


@pytest.mark.parametrize(
    ("changes", "what", "name", "detail"),
    [
        ({"scheme": "fp8_channel"}, "scheme", "", "int8, then fp8_channel"),
        ({"norm_offset": 1.0}, "norm_offset", "", "0.0, then 1.0"),
        ({"smoothing": {}, "groups": {}}, "smoothing", NORM, "in the first only"),
        ({"groups": {NORM: [UP, DOWN]}}, "readers", NORM, f"in one of them only: {DOWN}, {GATE}"),
        ({"scales": {UP: torch.ones(1)}}, "scale", UP, "shape [2, 1], then [1]"),
        ({"weights": [UP]}, "weight", GATE, "in the first only"),
        ({"weights": [UP, GATE, DOWN]}, "weight", DOWN, "in the second only"),
        ({"scales": {UP: torch.tensor([[1.0], [1.25]])}}, "scale", UP, "by up to 0.25"),
    ],
)
def test_every_difference_is_named(
    changes: dict[str, object], what: str, name: str, detail: str, profile: Profile
) -> None:
    [found] = compare_profiles(profile, attrs.evolve(profile, **changes))
    assert (found.what, found.name, found.detail) == (what, name, detail)
    assert found.largest == (0.25 if "up to" in detail else None)


def test_what_is_within_the_tolerance_is_none(profile: Profile) -> None:
    other = attrs.evolve(profile, scales={UP: torch.full((2, 1), 1.01)})
    assert compare_profiles(profile, other, tolerance=0.02) == ()
    assert len(compare_profiles(profile, other, tolerance=0.001)) == 1
