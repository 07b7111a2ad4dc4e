"""``flashrl overrides``: what a trainer's own launcher takes for a scheme and a correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.text import Text

from flashrl.cli._output import json_option, print_data
from flashrl.core.registry import TRAINERS, get_adapter
from flashrl.core.schemes import get_scheme, scheme_names

__all__ = ["DEFAULT_CORRECTION", "command", "correction_option", "scheme_option"]

DEFAULT_CORRECTION = "tis"

F = TypeVar("F", bound=Callable[..., Any])


def scheme_option(command: F) -> F:
    """The ``--scheme`` of the commands that start a trainer."""
    return click.option(
        "--scheme", type=click.Choice(scheme_names()), help="How rollouts are quantized."
    )(command)


def correction_option(command: F) -> F:
    """Their ``--correction``."""
    return click.option(
        "--correction",
        metavar="NAME",
        help="What corrects for it: tis (the default), icepop, off, or a preset's name.",
    )(command)


@click.command("overrides")
@click.argument("trainer")
@scheme_option
@correction_option
@json_option
def command(trainer: str, scheme: str | None, correction: str | None, as_json: bool) -> None:
    r"""What a trainer's own launcher takes for a scheme and a correction.

    \b
      flashrl overrides verl --scheme int8 --correction tis
      FLASHRL_CONFIG=int8 python -m verl.trainer.main_ppo $(flashrl overrides verl) ...

    One argument a line.  The scheme itself is said by FLASHRL_CONFIG.
    """
    adapter = get_adapter(TRAINERS, trainer)
    chosen, correction = get_scheme(scheme or "int8"), correction or DEFAULT_CORRECTION
    overrides = dict(adapter.overrides(chosen, correction=correction))
    arguments = adapter.launcher.syntax.write(overrides)
    data = {
        "trainer": trainer,
        "scheme": chosen.name,
        "correction": correction,
        "environment": {"FLASHRL_CONFIG": scheme or "int8"},
        "overrides": overrides,
        "arguments": arguments,
    }
    print_data(data, Text("\n".join(arguments)), as_json=as_json)
