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
            with (
                pool.borrow(checkpoint, cls.architecture) as engine,
                flashrl.attach(engine, scheme) as session,
            ):
                yield session

        return open_session


class TestQwen2(Attached):
    architecture = "qwen2"
    schemes = ("int8", "fp8_channel", "fp8_tensor", "fp8_block")

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoints(cls, request: pytest.FixtureRequest) -> tuple[Checkpoint, Checkpoint]:
        """Those that other tests use too, and so their engines."""
        shared: tuple[Checkpoint, Checkpoint] = request.getfixturevalue("wide_checkpoints")
        return shared


class TestQwen2Moe(Attached):
    architecture = "qwen2_moe"
    schemes = ("int8",)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def retire(cls, pool: Any) -> Iterator[None]:
        """Nobody else uses its engines."""
        yield
        pool.retire(cls.architecture)

    # It opens a second engine, which takes longer than the rest of the class; TestQwen2 has it.
    test_a_detached_session_says_so = None
