"""The embedded engine: the conformance suite, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import flashrl
from flashrl.session import Session
from flashrl.testing import EngineConformance

transformers = pytest.importorskip("transformers")


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


class Embedded(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls) -> Any:
        @contextmanager
        def open_session(checkpoint: Path, scheme: str) -> Iterator[Session]:
            with flashrl.attach(load(checkpoint), scheme) as session:
                yield session

        return open_session


class TestLlama(Embedded):
    schemes = ("int8", "fp8_channel", "fp8_tensor", "fp8_block")


class TestTiedLlama(Embedded):
    architecture = "llama_tied"
    schemes = ("int8",)


class TestQwen2(Embedded):
    architecture = "qwen2"


class TestQwen3(Embedded):
    architecture = "qwen3"
    schemes = ("int8",)


class TestQwen2Moe(Embedded):
    architecture = "qwen2_moe"


class TestMixtral(Embedded):
    architecture = "mixtral"
    schemes = ("int8",)
