"""How a trainer is started by its own means: its command, and how it spells its arguments.

Text only: nothing of a trainer is imported, and no argument is interpreted beyond its key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from flashrl.errors import ConfigError

__all__ = ["DashSyntax", "HydraSyntax", "Launcher", "Syntax"]

_HYDRA = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<key>[^=\s~+]+)=(?P<value>.*)", re.DOTALL)


class Syntax(Protocol):
    """How a command line spells keys and values."""

    def write(self, overrides: Mapping[str, Any]) -> list[str]:
        """The arguments that set some keys."""
        ...

    def read(self, arguments: Sequence[str]) -> dict[str, str]:
        """The keys that some arguments set, and their text."""
        ...


@attrs.frozen
class HydraSyntax:
    """``key=value``, as Hydra reads it; a key that its configuration lacks starts with ``+``.

    Example:
        >>> HydraSyntax().write({"algorithm.gamma": 1.0, "+extra.name": None, "flag": True})
        ['algorithm.gamma=1.0', '+extra.name=null', 'flag=true']
        >>> HydraSyntax().write({"bounds": "0.5_5.0"})
        ["bounds='0.5_5.0'"]
        >>> HydraSyntax().read(["algorithm.gamma=0.9", "++extra.name=x=y"])
        {'algorithm.gamma': '0.9', 'extra.name': 'x=y'}
    """

    def write(self, overrides: Mapping[str, Any]) -> list[str]:
        """One argument a key."""
        return [f"{key}={_hydra_text(value)}" for key, value in overrides.items()]

    def read(self, arguments: Sequence[str]) -> dict[str, str]:
        """Keys without their ``+``; the last one counts, as it does for Hydra."""
        found = (_HYDRA.fullmatch(argument) for argument in arguments)
        return {match["key"]: match["value"] for match in found if match}


@attrs.frozen
class DashSyntax:
    """``--key value``, as argparse reads it; a list is several values.

    Args:
        flags: A key whose value is true is written without it, and one that is false not at all.

    Example:
        >>> DashSyntax().write({"mode": "mask", "threshold": [0.5, 5.0]})
        ['--mode', 'mask', '--threshold', '0.5', '5.0']
        >>> DashSyntax().read(["--mode=clip", "--threshold", "0", "2", "--fast"])
        {'mode': 'clip', 'threshold': '0 2', 'fast': 'true'}
    """

    flags: bool = False

    def write(self, overrides: Mapping[str, Any]) -> list[str]:
        """An option a key, with its values behind it."""
        arguments: list[str] = []
        for key, value in overrides.items():
            if self.flags and isinstance(value, bool):
                arguments += [f"--{key}"] if value else []
                continue
            values = value if isinstance(value, list | tuple) else [value]
            arguments += [f"--{key}", *map(_dash_text, values)]
        return arguments

    def read(self, arguments: Sequence[str]) -> dict[str, str]:
        """Keys without their dashes; several values are one text, a flag is ``true``."""
        found: dict[str, list[str]] = {}
        key = None
        for argument in arguments:
            if argument.startswith("--"):
                key, equals, value = argument[2:].partition("=")
                found[key] = [value] if equals else []
            elif key is not None:
                found[key].append(argument)
        return {key: " ".join(values) or "true" for key, values in found.items()}


@attrs.frozen(kw_only=True)
class Launcher:
    """What starts a trainer, and how it takes arguments.

    Args:
        command: What follows the Python interpreter, before the arguments; empty where the user's
            own script comes first.
        syntax: How arguments are spelled.
    """

    command: tuple[str, ...] = ()
    syntax: Syntax = HydraSyntax()

    def complete(self, arguments: Sequence[str], overrides: Mapping[str, Any]) -> list[str]:
        """The user's arguments, and after them the overrides that they do not set.

        Args:
            arguments: As the user wrote them.
            overrides: What the run needs, by key.

        Raises:
            ConfigError: An argument sets a key to something else; all such are named.

        Example:
            >>> Launcher().complete(["a=1", "b=x"], {"a": 1.0, "+c": True})
            ['a=1', 'b=x', '+c=true']
        """
        given = self.syntax.read(arguments)
        lacking = {key: value for key, value in overrides.items() if key.lstrip("+") not in given}
        conflicts = [
            f"{key.lstrip('+')} is {given[key.lstrip('+')]}, and {_text(value)} is needed"
            for key, value in overrides.items()
            if key not in lacking and not _same(given[key.lstrip("+")], value)
        ]
        if conflicts:
            raise ConfigError(
                f"the arguments contradict the scheme or the correction: {'; '.join(conflicts)}. "
                "Drop them, choose another --correction, or start the trainer yourself with "
                "FLASHRL_CONFIG set"
            )
        return [*arguments, *self.syntax.write(lacking)]


def _same(text: str, value: Any) -> bool:
    """Whether an argument's text means a value: 2 is 2.0, None is null, quotes do not count."""
    parts = text.split() if isinstance(value, list | tuple) else [text]
    wanted = value if isinstance(value, list | tuple) else [value]
    return [_plain(part) for part in parts] == [_plain(_text(each)) for each in wanted]


def _plain(text: str) -> Any:
    text = text.strip("'\"")
    if text.lower() in ("none", "null"):
        return None
    try:
        return text.lower() if "_" in text else float(text)
    except ValueError:
        return text.lower()


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _hydra_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_hydra_text, value))}]"
    # Hydra reads 0.5_5 as the number 0.55, and what is quoted as text.
    number_like = isinstance(value, str) and value[:1].isdigit()
    return f"'{value}'" if number_like else _text(value)


def _dash_text(value: Any) -> str:
    return "None" if value is None else str(value)
