"""``flashrl run``: a trainer's own launcher, with rollouts in 8 bit."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping

import click
from rich.text import Text

from flashrl.cli._output import json_option, stderr_console
from flashrl.cli.overrides import DEFAULT_CORRECTION, correction_option, scheme_option
from flashrl.core.config import load_config
from flashrl.core.interfaces import TrainerAdapter
from flashrl.core.registry import TRAINERS, get_adapter
from flashrl.errors import ConfigError, MissingDependencyError

__all__ = ["command"]


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("trainer")
@scheme_option
@correction_option
@click.option("--dry-run", is_flag=True, help="Print the command instead of running it.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- [ARGUMENTS]...")
@json_option
def command(
    trainer: str,
    scheme: str | None,
    correction: str | None,
    dry_run: bool,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    r"""Run a trainer's own launcher with rollouts in 8 bit.

    \b
      flashrl run verl --scheme int8 -- data.train_files=train.parquet ...
      flashrl run trl -- train.py --use_vllm True

    Sets FLASHRL_CONFIG, and appends what the scheme and the correction need and the arguments do
    not say.  An argument that says otherwise is an error.
    """
    adapter: TrainerAdapter = get_adapter(TRAINERS, trainer)
    name = _choose_config(scheme, os.environ)
    entry = load_config(name).for_rank(0)
    correction = correction or entry.correction or DEFAULT_CORRECTION
    overrides = adapter.overrides(entry.quant_scheme, correction=correction)
    complete = adapter.launcher.complete(arguments, overrides)
    argv = [sys.executable, *adapter.launcher.command, *complete]
    if dry_run or as_json:
        line = f"FLASHRL_CONFIG={shlex.quote(name)} {shlex.join(argv)}"
        data = {"environment": {"FLASHRL_CONFIG": name}, "command": argv}
        click.echo(json.dumps(data, indent=2) if as_json else line)  # one line, never wrapped
        return
    viability = adapter.check()
    if not viability.ok:
        raise MissingDependencyError(f"{trainer}: {viability.reason}")
    added = complete[len(arguments) :]
    if added:
        stderr_console().print(Text(f"appended: {shlex.join(added)}"))
    sys.stdout.flush()
    os.execve(sys.executable, argv, {**os.environ, "FLASHRL_CONFIG": name})  # noqa: S606


def _choose_config(scheme: str | None, environ: Mapping[str, str]) -> str:
    """What FLASHRL_CONFIG shall be: what was asked for, what it is, or int8."""
    there = environ.get("FLASHRL_CONFIG", "").strip()
    if scheme and there and scheme != there:
        raise ConfigError(f"--scheme is {scheme}, and FLASHRL_CONFIG is {there}; unset one of them")
    return scheme or there or "int8"
