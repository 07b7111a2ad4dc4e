"""The conformance suite, on engines that were running in 16 bit and attached to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import flashrl
from flashrl.session import Session
from flashrl.testing import Checkpoint, EngineConformance


class Attached(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls, pool: Any) -> Any:
        @contextmanager
        def open_session(checkpoint: Path, scheme: str) -> Iterator[Session]:
            engine_of = f"{cls.architecture} {scheme == 'fp8_block'}"
            with (
                pool.borrow(checkpoint, engine_of) as engine,
                flashrl.attach(engine, scheme) as session,
            ):
                yield session

        return open_session


class TestLlama(Attached):
    schemes = ("int8", "fp8_channel", "fp8_tensor")


class TestBlocks(Attached):
    """Parts must fall on blocks, so this model is wider."""

    schemes = ("fp8_block",)

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoints(cls, make_checkpoints: Any) -> tuple[Checkpoint, ...]:
        return make_checkpoints(
            "llama",
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=4,
            initializer_range=0.2,
        )


class TestQwen3Moe(Attached):
    architecture = "qwen3_moe"
    schemes = ("int8",)
