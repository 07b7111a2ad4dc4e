"""``flashrl setup``: write the file that FLASHRL_CONFIG names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.text import Text

from flashrl.cli._entries import as_data, tabulate
from flashrl.cli._files import back_up, check_folder, write_text
from flashrl.cli._output import json_option, print_data, stderr_console
from flashrl.core.config import Config, Entry, parse_overrides
from flashrl.core.schemes import scheme_names
from flashrl.errors import ConfigError

__all__ = ["command"]

_PYTHON = re.compile(r"None|[(].*[)]|\w+[(].*[)]")  # what eval once took, and YAML reads as text


@click.command("setup")
@click.option("-m", "--model", metavar="PATH|NAME", help="Start this model, not the script's own.")
@click.option("-p", "--profile", metavar="PATH|NAME", help="Made by flashrl profile.")
@click.option(
    "--fn",
    type=click.Choice(scheme_names()),
    default="int8",
    show_default=True,
    help="How rollouts are quantized.",
)
@click.option(
    "-o",
    "--config-output",
    "output",
    type=click.Path(path_type=Path),
    default=Path("~/.flashrl_config.yaml"),
    show_default=True,
)
@click.option("-a", "--append", is_flag=True, help="Add an entry to the file, if there is one.")
@click.argument("columns", nargs=-1, metavar="[KEY=VALUE]...")
@json_option
def command(
    model: str | None,
    profile: str | None,
    fn: str,
    output: Path,
    append: bool,
    columns: tuple[str, ...],
    as_json: bool,
) -> None:
    r"""Write a configuration, or with -a one more entry of it.

    \b
      flashrl setup -p profile.safetensors --fn int8 -o flashrl.yaml
      flashrl setup -a --fn bf16 -o flashrl.yaml      half of the ranks in BF16
      export FLASHRL_CONFIG=flashrl.yaml

    Data-parallel rank r uses entry r mod n.  Further keys of the entry follow as KEY=VALUE; a value
    is YAML and never code: dynamic=false, ignore=[lm_head].  What a file loses is kept as FILE.bak.
    """
    output = output.expanduser()
    check_folder(output)
    values = {"fn": fn, "model": _absolute(model), "profile": _absolute(profile)}
    entry = _make_entry({**values, **_parse(columns)})
    old = output.read_bytes() if output.exists() else b""
    before = Config.read(output).entries if append and old else ()
    config = Config(entries=[*before, entry], source=str(output))
    text = config.to_yaml()
    kept = {text.encode(), Config(entries=before).to_yaml().encode() if before else b""}
    backup = None if old in kept else back_up(output)
    write_text(output, text)
    data = {"path": str(output), "backup": str(backup) if backup else None, **as_data(config)}
    _say(entry, backup)
    export = Text(f"\nexport FLASHRL_CONFIG={output}", style="bold")
    print_data(data, Group(tabulate(config), export), as_json=as_json)


def _absolute(name: str | None) -> str | None:
    """A local path as every process finds it, wherever it runs; a name on the hub as it is."""
    if name is None or not Path(name).expanduser().exists():
        return name
    return str(Path(name).expanduser().absolute())


def _parse(columns: tuple[str, ...]) -> dict[str, Any]:
    values = parse_overrides(columns)
    python = [
        f"{key}={value}"
        for key, value in values.items()
        if isinstance(value, str) and _PYTHON.fullmatch(value)
    ]
    if python:
        raise ConfigError(
            f"{', '.join(python)}: this is Python, and values are YAML; write null for None, and "
            "[a, b] for a list"
        )
    return values


def _make_entry(values: Mapping[str, Any]) -> Entry:
    try:
        return Config.from_mapping({"configs": [values]}, source="this entry").entries[0]
    except ConfigError as error:
        raise ConfigError(str(error).replace("configs[0].", "")) from error


def _say(entry: Entry, backup: Path | None) -> None:
    """What the user may not expect, on stderr."""
    console = stderr_console()
    if backup is not None:
        console.print(Text(f"the file that was there is kept as {backup}"))
    if entry.profile is not None and not Path(entry.profile).exists():
        console.print(
            Text(
                f"note: there is no file {entry.profile} yet; flashrl config validate checks that "
                "all is there",
                style="yellow",
            )
        )
