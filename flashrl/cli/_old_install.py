"""What flash-llm-rl left in ``usercustomize.py``, found by its syntax and taken out again.

Its ``setup`` appends ``try: import flash_rl`` and ``except ImportError: pass``, so that every
Python process imports it, and with it what it patches (flash-llm-rl 1.0.3, ``commands.py``).
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import site
from collections.abc import Iterator
from pathlib import Path

import attrs

from flashrl.errors import ConfigError

__all__ = ["FILE_NAME", "Leftover", "find_files", "inspect_file"]

FILE_NAME = "usercustomize.py"
_MODULE = "flash_rl"
_MENTION = re.compile(rf"\b{_MODULE}\b")


@attrs.frozen(kw_only=True)
class Leftover:
    """A file that imports flash_rl.

    Args:
        path: The file.
        before: Its content.
        after: Its content without the import.
        doubtful: Lines, from 1, that mention flash_rl in a way its ``setup`` never wrote.
    """

    path: Path
    before: str = attrs.field(repr=False)
    after: str = attrs.field(repr=False)
    doubtful: tuple[int, ...]

    @property
    def changes(self) -> bool:
        """Whether there is something to take out."""
        return self.before != self.after

    @property
    def is_emptied(self) -> bool:
        """Whether nothing but the import was in it."""
        return self.changes and not self.after.strip()

    def diff(self) -> str:
        """What would change, as a unified diff; empty if nothing."""
        old, new = self.before.splitlines(), self.after.splitlines()
        name = str(self.path)
        return "\n".join(difflib.unified_diff(old, new, name, name, lineterm=""))


def find_files(path: Path | None = None) -> list[Path]:
    """Every ``usercustomize.py`` that this Python may import.

    Args:
        path: Another file, or the folder of one, instead.

    Raises:
        ConfigError: ``path`` does not exist.
    """
    if path is not None:
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        return [path]
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return [
        file for folder in dict.fromkeys(folders) if (file := Path(folder, FILE_NAME)).is_file()
    ]


def inspect_file(path: Path) -> Leftover:
    """Look for the import in a file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        before = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    lines = io.StringIO(before, newline="").readlines()  # lines as Python counts them
    ours = set(_find_imports(before))
    kept = [line for number, line in enumerate(lines, start=1) if number not in ours]
    return Leftover(
        path=path,
        before=before,
        after="".join(kept),
        doubtful=tuple(
            number
            for number, line in enumerate(lines, start=1)
            if number not in ours and _MENTION.search(line.partition("#")[0])
        ),
    )


def _find_imports(source: str) -> Iterator[int]:
    """The lines of every statement that does nothing but import flash_rl."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return  # such a file runs nothing, and every mention in it is doubtful
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in statements]
    for index, (node, (start, end)) in enumerate(zip(statements, spans, strict=True)):
        neighbours = [*spans[max(index - 1, 0) : index], *spans[index + 1 : index + 2]]
        alone = not any(first <= end and start <= last for first, last in neighbours)
        if alone and (_is_import(node) or _is_guarded_import(node)):
            yield from range(start, end + 1)


def _is_guarded_import(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Try)
        and all(map(_is_import, node.body))
        and all(isinstance(x, ast.Pass) for handler in node.handlers for x in handler.body)
        and not node.orelse
        and not node.finalbody
    )


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and [alias.name for alias in node.names] == [_MODULE]
