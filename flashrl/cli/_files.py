"""Files that a command writes for people: whole or not at all, and nothing of theirs is lost."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from flashrl.errors import ConfigError

__all__ = ["back_up", "check_folder", "write_text"]


def check_folder(path: Path) -> None:
    """Check, before the work starts, that a file can be put there.

    Raises:
        ConfigError: The folder does not exist or cannot be written to, or the path is a folder.
    """
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file in it")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: the folder {folder} is read-only")


def back_up(path: Path) -> Path:
    """Copy a file beside itself, under the first free name of ``NAME.bak``, ``NAME.bak1``, ...

    Raises:
        ConfigError: The copy cannot be written.
    """
    names = itertools.chain([".bak"], (f".bak{number}" for number in itertools.count(1)))
    backup = next(
        candidate for name in names if not (candidate := path.with_name(path.name + name)).exists()
    )
    try:
        shutil.copy2(path, backup)
    except OSError as error:
        raise ConfigError(
            f"no backup of {path} could be made, so it was left alone: {error}"
        ) from error
    return backup


def write_text(path: Path, text: str) -> None:
    """Write a file; an old one stays whole until the new one is, and keeps its permissions.

    Raises:
        ConfigError: It cannot be written.
    """
    path = path.resolve()  # what a link points to is replaced, and not the link
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
