"""The conformance suite, on engines started in 8 bit and on engines made so while they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import flashrl
from flashrl.session import Session
from flashrl.testing import Checkpoint, EngineConformance, make_checkpoint

from .conftest import SIZES, start


class VLLMConformance(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def checkpoints(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ...]:
        folder = tmp_path_factory.mktemp(cls.architecture)
        return tuple(
            make_checkpoint(folder / name, cls.architecture, seed=seed, **SIZES)
            for seed, name in enumerate("ab")
        )


class TestStartedIn8Bit(VLLMConformance):
    architecture = "qwen2"

    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls) -> Any:
        @contextmanager
        def open_session(checkpoint: Path, scheme: str) -> Iterator[Session]:
            engine = start(checkpoint, **flashrl.launch_args("vllm", scheme))
            yield flashrl.attach(engine, scheme)

        return open_session


class TestMade8BitWhileRunning(VLLMConformance):
    architecture = "llama_tied"
    schemes = ("int8", "fp8_tensor")

    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls) -> Any:
        @contextmanager
        def open_session(checkpoint: Path, scheme: str) -> Iterator[Session]:
            with flashrl.attach(start(checkpoint), scheme) as session:
                yield session

        return open_session


class TestBlocks(TestStartedIn8Bit):
    architecture = "llama"
    schemes = ("fp8_block",)
