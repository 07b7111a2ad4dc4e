"""Finds the runs in a folder, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from flashrl.errors import ConfigError
from flashrl.report.records import RUN_PATTERN, JsonLinesReader, Run
from flashrl.report.tensorboard import TensorBoardReader

__all__ = ["READERS", "RunReader", "read_runs"]


class RunReader(Protocol):
    """Finds runs in a folder, in a format of its own."""

    def read(self, folder: Path) -> Iterator[Run]:
        """The runs it finds, in the order to show them; none if there are none."""
        ...


READERS: Sequence[RunReader] = (JsonLinesReader(), TensorBoardReader())
"""The formats that :func:`read_runs` looks for."""


def read_runs(folder: Path, *, readers: Sequence[RunReader] = READERS) -> list[Run]:
    """Every run in a folder.

    Args:
        folder: Where a demo or a trainer wrote.
        readers: The formats to look for.

    Returns:
        The runs, in the order to show them.

    Raises:
        ConfigError: There is no such folder, no run in it, or a file of it is damaged.
        MissingDependencyError: What a trainer logged takes a library to read, which is missing.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one that a run wrote to")
    runs = [run for reader in readers for run in reader.read(folder)]
    if not runs:
        raise ConfigError(
            f"{folder} holds no run ({RUN_PATTERN}, or TensorBoard's event files); "
            f"`flashrl demo --output {folder}` writes some, and so do trainers"
        )
    return runs
