"""Two ranks of one engine, each with its part of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashrl
from flashrl.core.profiles import Profile
from flashrl.core.updates.quantized import quantize_tensors
from flashrl.errors import UnsupportedError, WeightUpdateError
from flashrl.testing import Checkpoint

from .ways import generate, load_from_disk, push

Checkpoints = tuple[Checkpoint, Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(make_checkpoints: Any) -> Checkpoints:
    """Of sizes that SGLang need not pad to run them on two CPUs."""
    found: Checkpoints = make_checkpoints("qwen2", hidden_size=128, intermediate_size=256)
    return found


@pytest.fixture(scope="module")
def engine(pool: Any, checkpoints: Checkpoints) -> Iterator[Any]:
    with pool.running(checkpoints[0].path, tp_size=2) as engine:
        yield engine


@pytest.fixture
def session(engine: Any) -> Iterator[Any]:
    with flashrl.attach(engine, "int8") as session:
        yield session


def test_alternating_pushes_equal_the_reference(
    engine: Any, session: Any, checkpoints: Checkpoints
) -> None:
    answers: dict[int, list[list[int]]] = {}
    for step in range(4):
        which = step % 2
        if step < 2:
            assert load_from_disk(engine, checkpoints[which].path)[0]
        else:
            session.update_weights(checkpoints[which].named_tensors())
        assert session.verify(checkpoints[which].named_tensors()).ok
        assert generate(engine) == answers.setdefault(which, generate(engine))
    assert answers[0] != answers[1]
    assert session.describe()["ranks"] == 2


def test_bad_pushes_are_named_and_no_rank_waits_for_the_other(
    session: Any, checkpoints: Checkpoints
) -> None:
    bad = {name: tensor.clone() for name, tensor in checkpoints[1].named_tensors()}
    culprit = "model.layers.1.self_attn.o_proj.weight"
    bad[culprit][-1, -1] = math.nan  # the second rank's part alone
    with pytest.raises(WeightUpdateError) as caught:
        session.update_weights(bad.items())
    assert list(caught.value.faults) == [culprit]
    session.update_weights(checkpoints[1].named_tensors())
    assert session.verify(checkpoints[1].named_tensors()).ok


def test_quantized_weights_are_cut_with_their_scales(
    engine: Any, session: Any, checkpoints: Checkpoints
) -> None:
    """A row that two ranks share keeps the one scale that it came with."""
    pairs = list(quantize_tensors(checkpoints[1].named_tensors(), "int8"))
    assert push(engine, pairs)[0]
    tensors = dict(pairs)
    for name in checkpoints[1].model.state_dict():
        [(_, held)] = session.engine.read_weights([name])
        scale = tensors.get(f"{name}_scale", torch.ones(1))
        assert torch.equal(held, tensors[name].float() * scale), name


def test_profiles_reach_each_rank(engine: Any, checkpoints: Checkpoints) -> None:
    held: dict[str, Tensor] = dict(checkpoints[0].named_tensors())
    sources = {
        "model.layers.0.input_layernorm.weight": [f"self_attn.{part}_proj" for part in "qkv"],
        "model.layers.0.mlp.up_proj.weight": ["mlp.down_proj"],
    }
    profile = Profile(
        scheme="int8",
        smoothing={source: torch.rand(held[source].shape[0]) + 0.5 for source in sources},
        groups={
            source: [f"model.layers.0.{reader}.weight" for reader in readers]
            for source, readers in sources.items()
        },
    )
    with flashrl.attach(engine, "int8", profile=profile) as session:
        session.update_weights(checkpoints[0].named_tensors())
        assert session.verify(checkpoints[0].named_tensors()).ok
    with flashrl.attach(engine, "int8", profile=profile) as session:  # from what it holds
        close = dict(session.engine.read_weights(list(held)))
    for name, tensor in close.items():
        expected = profile.smooth(name, held[name], dtype=torch.float32)
        assert (tensor - expected).abs().max() <= 0.03 * expected.abs().max(), name


def test_one_scale_a_tensor_is_refused(engine: Any) -> None:
    with pytest.raises(UnsupportedError, match="use fp8_channel, which no split changes"):
        flashrl.attach(engine, "fp8_tensor")
