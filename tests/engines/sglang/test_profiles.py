"""Profiles: every pushed tensor is smoothed on its way in, however it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import flashrl
from flashrl.core.profiles import Profile
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.core.updates.quantized import quantize_tensors
from flashrl.errors import EngineStateError, ProfileError, SchemeError
from flashrl.testing import Checkpoint

from .smoothing import SOURCE, make_profile, smooth, weights
from .ways import fused, generate, load_from_disk, push

Checkpoints = tuple[Checkpoint, Checkpoint]

DYNAMIC = get_scheme("int8")
STATIC = DYNAMIC.evolve(name="int8_static", dynamic=False)


@pytest.fixture(scope="module")
def profile(wide_checkpoints: Checkpoints) -> Profile:
    return make_profile(wide_checkpoints[0])


@pytest.fixture
def plain(pool: Any, wide_checkpoints: Checkpoints) -> Iterator[Any]:
    """A 16-bit engine that holds A."""
    with pool.borrow(wide_checkpoints[0].path, "qwen2") as engine:
        yield engine


def check_by_hand(
    session: Any, pushed: dict[str, Tensor], profile: Profile, scheme: QuantScheme
) -> None:
    """Each tensor against arithmetic that is written out."""
    for name, held in session.engine.read_weights(list(pushed)):
        expected = smooth(name, pushed[name], profile)
        if name not in SOURCE:
            expected = expected.to(torch.bfloat16).float()
        else:
            amax = expected.abs().amax(1, keepdim=True)
            scale = amax / 127 if scheme.dynamic else profile.scales[name]
            expected = (expected / scale).round().clamp(-127, 127) * scale
        assert torch.equal(held, expected), name


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_every_way_in_is_smoothed(
    plain: Any, wide_checkpoints: Checkpoints, profile: Profile, scheme: QuantScheme
) -> None:
    first, second = wide_checkpoints
    with flashrl.attach(plain, scheme, profile=profile) as session:
        check_by_hand(session, weights(first), profile, scheme)
        assert session.verify(first.named_tensors()).ok
        session.update_weights(second.named_tensors())
        check_by_hand(session, weights(second), profile, scheme)
        assert session.verify(second.named_tensors()).ok
        answer = generate(plain)
        for load in (
            lambda pairs: push(plain, pairs),
            lambda pairs: push(plain, fused(pairs), load_format="direct"),
            lambda pairs: load_from_disk(plain, second.path),
        ):
            session.update_weights(first.named_tensors())
            success, message, *_ = load(list(weights(second).items()))
            assert success, message
            assert session.verify(second.named_tensors()).ok
            assert generate(plain) == answer


def test_a_detached_engine_has_what_was_pushed(
    plain: Any, wide_checkpoints: Checkpoints, profile: Profile
) -> None:
    """Without an update all is as before; after one, norms are exact and linears within a step."""
    _, second = wide_checkpoints
    before = generate(plain)
    flashrl.attach(plain, "int8", profile=profile).detach()
    assert generate(plain) == before
    with flashrl.attach(plain, "int8", profile=profile) as session:
        session.update_weights(second.named_tensors())
    pushed = weights(second)
    with flashrl.attach(plain, "bf16") as session:
        for name, held in session.engine.read_weights(list(pushed)):
            if name not in SOURCE:
                assert torch.equal(held, pushed[name].float()), name
                continue
            step = smooth(name, pushed[name], profile).abs().amax(1, keepdim=True) / 127
            reach = step / profile.smoothing[SOURCE[name]]
            rows = profile.smoothing.get(name)
            reach = reach if rows is None else reach * rows[:, None]
            rounding = held.abs() / 128  # bfloat16
            assert bool(((held - pushed[name].float()).abs() <= 0.51 * reach + rounding).all())


def test_a_profile_that_does_not_fit_leaves_the_engine_as_it_was(
    plain: Any, profile: Profile
) -> None:
    before = generate(plain)
    wrong = {name: torch.cat([factor, factor]) for name, factor in profile.smoothing.items()}
    with pytest.raises(ProfileError, match="channels"):
        flashrl.attach(plain, "int8", profile=attrs.evolve(profile, smoothing=wrong))
    lacking = attrs.evolve(profile, scales={}, weights=profile.weights)
    with pytest.raises(SchemeError, match="the profile has none for model"):
        flashrl.attach(plain, STATIC, profile=lacking)
    assert generate(plain) == before


def test_what_a_profile_would_change_cannot_come_quantized(
    plain: Any, wide_checkpoints: Checkpoints, profile: Profile
) -> None:
    with flashrl.attach(plain, "int8", profile=profile) as session:
        success, message = push(
            plain, list(quantize_tensors(wide_checkpoints[1].named_tensors(), "int8"))
        )
        assert not success
        assert "model.layers.0.self_attn.q_proj.weight_scale" in message
        assert "push it in 16 bit" in message
        session.update_weights(wide_checkpoints[0].named_tensors())
        assert session.verify(wide_checkpoints[0].named_tensors()).ok


def test_attaching_with_another_profile_is_refused(plain: Any, profile: Profile) -> None:
    other = attrs.evolve(profile, norm_offset=1.0)
    with flashrl.attach(plain, "int8", profile=profile):
        for given in (None, other):
            with pytest.raises(EngineStateError, match="made 8-bit with another profile"):
                flashrl.attach(plain, "int8", profile=given)
        flashrl.attach(plain, "int8", profile=profile)
