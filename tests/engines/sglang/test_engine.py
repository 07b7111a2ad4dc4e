"""What an engine that was started 8-bit is, and what it refuses to be."""

from __future__ import annotations

from typing import Any

import pytest

import flashrl
from flashrl.core.schemes import get_scheme
from flashrl.errors import EngineStateError, SchemeError, UnsupportedError, WeightUpdateError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .ways import load_from_disk, push

Checkpoints = tuple[Checkpoint, Checkpoint]


def test_every_address_stays(session: Session, engine: Any, wide_checkpoints: Checkpoints) -> None:
    """vllm#50521, #48438, #48539: graphs and handles stay right."""

    def addresses() -> dict[str, list[int]]:
        [places] = session.engine._call("weights")  # type: ignore[attr-defined]
        return {name: place["addresses"] for name, place in places.items()}

    before = addresses()
    session.update_weights(wide_checkpoints[1].named_tensors())
    push(engine, list(wide_checkpoints[1].named_tensors()))
    load_from_disk(engine, wide_checkpoints[0].path)
    assert addresses() == before
    assert len(before) == len(session.engine.weights())


def test_attaching_with_another_scheme_is_refused(session: Session, engine: Any) -> None:
    with pytest.raises(EngineStateError, match="already, with int8"):
        flashrl.attach(engine, "fp8_channel")


@pytest.mark.parametrize(
    ("changes", "message", "kind"),
    [
        ({"kv_cache": "fp8"}, "an fp8 KV cache", UnsupportedError),
        ({"prune_dead_neurons": True}, "pruning of dead neurons", UnsupportedError),
        ({"dynamic": False}, "static scales", SchemeError),
    ],
)
def test_what_would_be_left_out_is_refused(
    engine: Any, changes: dict[str, Any], message: str, kind: type[Exception]
) -> None:
    scheme = get_scheme("int8").evolve(**changes)
    with pytest.raises(kind, match=message):
        flashrl.attach(engine, scheme)
    with pytest.raises(kind, match=message):
        flashrl.launch_args("sglang", scheme)


def test_a_partial_update_through_the_session_is_an_error(
    session: Session, wide_checkpoints: Checkpoints
) -> None:
    pairs = list(wide_checkpoints[0].named_tensors())
    with pytest.raises(WeightUpdateError) as caught:
        session.update_weights(pairs[1:])
    assert caught.value.missing == (pairs[0][0],)
