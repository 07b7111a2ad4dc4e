"""Runs the command line in this process, with its two streams apart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from flashrl.cli import main


@attrs.frozen
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def flashrl(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Call it with arguments, as in a shell."""
    for name in ("FLASHRL_CONFIG", "FLASHRL_DEBUG", "FLASHRL_LOGGING_FILE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("flashrl")
    handlers, level = logger.handlers[:], logger.level

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            main(list(arguments), prog_name="flashrl")
        streams = capsys.readouterr()
        return Result(int(exited.value.code or 0), streams.out, streams.err)

    yield run
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)
