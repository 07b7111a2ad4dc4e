"""Mixtures of experts, whose tensors have one name in the trainer and another on disk."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import flashrl
from flashrl.testing import Checkpoint

from .ways import generate, push


def on_disk(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return load_file(checkpoint.path / "model.safetensors")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_load_under_the_trainers_names_and_the_checkpoints(
    pool: Any, make_checkpoints: Any, architecture: str
) -> None:
    """SkyRL#1852: transformers stacks the experts of a layer, checkpoints hold each by itself."""
    first, second = make_checkpoints(architecture)
    with (
        pool.running(second.path) as engine,
        flashrl.attach(engine, "int8") as session,
    ):
        infos = session.engine.weights()
        assert infos.keys() == on_disk(second).keys()
        experts = {name for name in infos if ".experts." in name}
        assert len(experts) == 2 * 4 * 3
        assert {infos[name].scheme for name in experts} == {session.scheme}
        answer = generate(engine)

        session.update_weights(first.named_tensors())
        assert session.verify(on_disk(first).items()).ok
        assert generate(engine) != answer
        for pairs in (list(second.named_tensors()), list(on_disk(second).items())):
            session.update_weights(first.named_tensors())
            success, message = push(engine, [(name, tensor.clone()) for name, tensor in pairs])
            assert success, message
            assert session.verify(second.named_tensors()).ok
            assert generate(engine) == answer
