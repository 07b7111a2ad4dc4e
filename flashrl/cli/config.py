"""``flashrl config``: show or check what FLASHRL_CONFIG, or a file for it, comes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.text import Text

from flashrl.cli._entries import as_data, tabulate
from flashrl.cli._output import json_option, pass_json_on, print_data
from flashrl.core.config import Config, Entry, load_config
from flashrl.core.schemes import get_scheme
from flashrl.errors import ConfigError, FlashRLError, ProfileError, VerificationError

__all__ = ["command"]

_UNSET = "FLASHRL_CONFIG is not set: rollouts stay as they are"


@click.group("config", invoke_without_command=True, subcommand_metavar="[COMMAND]")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show or check what FLASHRL_CONFIG, or a file for it, comes to; alone, show it."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(show, value=None, as_json=as_json)
    else:
        pass_json_on(ctx)


_argument = click.argument("value", required=False, metavar="[FILE]")


@command.command("show")
@_argument
@json_option
def show(value: str | None, as_json: bool) -> None:
    """The entry of each kind of rank, with what it means.

    FILE is whatever FLASHRL_CONFIG may be, and its value by default.
    """
    config = load_config(value)
    data = {"source": config.source if config else None, **as_data(config)}
    print_data(data, tabulate(config) if config else Text(_UNSET), as_json=as_json)


@command.command("validate")
@_argument
@json_option
def validate(value: str | None, as_json: bool) -> None:
    """Check the file and the profiles it names; exit code 1 if something is wrong.

    A profile must be safe and whole, have the scales that dynamic: false wants, and fit the entry's
    model if that is a local folder.
    """
    try:
        config = load_config(value)
        faults = list(_find_faults(config)) if config else []
    except ConfigError as error:
        if value is None or not Path(value).is_file():
            raise
        config, faults = None, [str(error)]
    data = {
        "source": config.source if config else value,
        "ok": not faults,
        "faults": faults,
        **as_data(config),
    }
    unread = Text(_UNSET if value is None else f"{value} is no good")
    print_data(data, tabulate(config) if config else unread, as_json=as_json)
    if faults:
        raise VerificationError("\n".join(faults))


def _find_faults(config: Config) -> Iterator[str]:
    for index, entry in enumerate(config.entries):
        try:
            _check_profile(entry)
        except FlashRLError as error:
            yield f"configs[{index}].profile: {error}"


def _check_profile(entry: Entry) -> None:
    if entry.profile is None:
        return
    from flashrl.core.profiles.checkpoints import Checkpoint
    from flashrl.core.profiles.files import load_profile

    scheme = entry.quant_scheme
    profile = load_profile(entry.profile, scheme=scheme.name)
    made_for = get_scheme(profile.scheme)
    if not scheme.dynamic and (made_for.type, made_for.strategy) != (scheme.type, scheme.strategy):
        raise ProfileError(
            f"dynamic is false, and {entry.profile} has static scales for {made_for.name}, not for "
            f"{scheme.name}; make a profile for that, or leave dynamic out"
        )
    if not scheme.dynamic and profile.scales.keys() != set(profile.weights):
        raise ProfileError(
            f"dynamic is false, and {entry.profile} has static scales of {len(profile.scales)} of "
            f"{len(profile.weights)} weights; make it with --static-scales, or leave dynamic out"
        )
    if entry.model and Path(entry.model).is_dir():
        model = Checkpoint.open(entry.model)
        profile.check({name: header.shape for name, header in model.headers.items()})
