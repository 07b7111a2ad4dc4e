"""What every command prints with: data on stdout, as a table or as JSON; messages on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console, RenderableType
from rich.text import Text

__all__ = [
    "CheckFailure",
    "Failure",
    "json_option",
    "pass_json_on",
    "print_data",
    "stderr_console",
    "stdout_console",
]

F = TypeVar("F", bound=Callable[..., Any])

_PIPE_WIDTH = 160  # where there is no terminal to measure, lines need not be short


def stdout_console() -> Console:
    """For data.  Rich honours NO_COLOR, and leaves colour out where there is no terminal."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """For messages and progress."""
    return _console(sys.stderr)


def _console(file: IO[str]) -> Console:
    return Console(file=file, width=None if file.isatty() else _PIPE_WIDTH, highlight=False)


def json_option(command: F) -> F:
    """The ``--json`` of every command, passed as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(
        command
    )


def pass_json_on(ctx: click.Context) -> None:
    """Hand a group's ``--json`` to the command in it that was asked for.

    Raises:
        UsageError: The group was given other options, which would do nothing.
    """
    command = str(ctx.invoked_subcommand)
    ctx.default_map = {command: {"as_json": ctx.params["as_json"]}}
    for parameter in ctx.command.params:
        name = str(parameter.name)
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name != "as_json":
            raise click.UsageError(f"{parameter.opts[0]} has no use before {command!r}")


def print_data(data: Mapping[str, Any], table: RenderableType, *, as_json: bool) -> None:
    """Print a command's result.

    Args:
        data: The result as plain values.
        table: The same for people.
        as_json: Print ``data``, else ``table``.
    """
    if as_json:
        click.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        stdout_console().print(table)


class Failure(click.ClickException):
    """One of our errors, as the command line shows it: the message in red, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        console = stderr_console() if file is None else _console(file)
        console.print(Text(f"error: {self.message}", style="bold red"), soft_wrap=True)


class CheckFailure(Failure):
    """A check that ran to its end and failed: exit code 1."""

    exit_code = 1
