"""FLASHRL_LOGGING_LEVEL and FLASHRL_LOGGING_FILE reach the processes that SGLang starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrl.testing import Checkpoint


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the log goes; what is set up for it in this process is undone."""
    file = tmp_path / "flashrl.log"
    monkeypatch.setenv("FLASHRL_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("FLASHRL_LOGGING_FILE", str(file))
    logger = logging.getLogger("flashrl")
    handlers, level = logger.handlers[:], logger.level
    yield file
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_scheduler_logs_to_the_file(
    pool: Any, wide_checkpoints: tuple[Checkpoint, Checkpoint], file: Path
) -> None:
    """It says at INFO what it hooked, before it has a model."""
    with pool.running(wide_checkpoints[0].path):
        lines = [line.split(" ", 3) for line in file.read_text().splitlines()]
    assert all(words.startswith("INFO flashrl.") for *_, words in lines)
    said = {int(process) for *_, process, words in lines if "hooked" in words}
    assert said - {os.getpid()}
