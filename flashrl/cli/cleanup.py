"""``flashrl cleanup``: undo what an old install left, and say how to turn ours off."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from flashrl.cli._files import back_up, write_text
from flashrl.cli._old_install import FILE_NAME, Leftover, find_files, inspect_file
from flashrl.cli._output import json_option, print_data
from flashrl.errors import ConfigError

__all__ = ["command"]

_OLD_DISTRIBUTION = "flash-llm-rl"
_PLUGINS = {
    # engine: (variable that lists the plug-ins to load, prefix of their entry-point groups)
    "vLLM": ("VLLM_PLUGINS", "vllm."),
    "SGLang": ("SGLANG_PLUGINS", "sglang."),
}


@click.command("cleanup")
@click.option(
    "-p",
    "--path",
    type=click.Path(path_type=Path),
    help=f"A {FILE_NAME} or its folder, instead of this Python's own.",
)
@click.option("--apply", "apply_it", is_flag=True, help="Do it; without this, only show it.")
@json_option
def command(path: Path | None, apply_it: bool, as_json: bool) -> None:
    """Undo what an old install of flash-llm-rl left, and say how to turn FlashRL off.

    flash-llm-rl made every Python process import it through usercustomize.py.  The lines are shown
    as a diff; --apply takes them out and keeps the old file as usercustomize.py.bak.  FlashRL
    itself writes no such file.
    """
    leftovers = [inspect_file(file) for file in find_files(path)]
    backups = {
        leftover.path: _apply(leftover) for leftover in leftovers if apply_it and leftover.changes
    }
    data = {
        "applied": bool(backups),
        "files": [
            {
                "path": str(leftover.path),
                "diff": leftover.diff(),
                "doubtful_lines": list(leftover.doubtful),
                "backup": str(backups[leftover.path]) if leftover.path in backups else None,
            }
            for leftover in leftovers
            if leftover.changes or leftover.doubtful
        ],
        "old_install": _find_old_install(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("FLASHRL_")},
        "turn_off": _how_to_turn_off(),
    }
    print_data(data, _render(data, leftovers), as_json=as_json)


def _apply(leftover: Leftover) -> Path:
    backup = back_up(leftover.path)
    if leftover.is_emptied:
        try:
            leftover.path.unlink()
        except OSError as error:
            raise ConfigError(f"{leftover.path} cannot be removed: {error}") from error
    else:
        write_text(leftover.path, leftover.after)
    return backup


def _find_old_install() -> str | None:
    try:
        return metadata.version(_OLD_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _how_to_turn_off() -> list[dict[str, str]]:
    """What to do, most common first, and what it does."""
    steps = [{"do": "unset FLASHRL_CONFIG", "effect": "engines start as if FlashRL were not there"}]
    for engine, (variable, prefix) in _PLUGINS.items():
        # An empty list means all plug-ins to SGLang, so there is always a name in it.
        names = ",".join(_find_other_plugins(variable, prefix)) or "none"
        steps.append(
            {"do": f"export {variable}={names}", "effect": f"{engine} does not load our plug-in"}
        )
    steps.append({"do": "pip uninstall flashrl", "effect": "nothing of it is left"})
    if _find_old_install():
        steps.append(
            {
                "do": f"pip uninstall {_OLD_DISTRIBUTION}",
                "effect": "the old package, whose command is called flashrl too, is gone",
            }
        )
    return steps


def _find_other_plugins(variable: str, prefix: str) -> list[str]:
    """The plug-ins that an engine loads beside ours."""
    listed = [name.strip() for name in os.environ.get(variable, "").split(",")]
    if not any(listed):
        groups = [group for group in metadata.entry_points().groups if group.startswith(prefix)]
        listed = [e.name for group in groups for e in metadata.entry_points(group=group)]
    return sorted({*listed} - {"", "flashrl"})


def _render(data: dict[str, Any], leftovers: list[Leftover]) -> Group:
    parts: list[RenderableType] = []
    if not data["files"]:
        parts.append(Text(f"No {FILE_NAME} imports flash_rl."))
    for leftover, shown in zip(
        (one for one in leftovers if one.changes or one.doubtful), data["files"], strict=True
    ):
        if shown["diff"]:
            parts.append(Syntax(shown["diff"], "diff", background_color="default"))
        if shown["backup"]:
            done = "removed, for nothing else was in it" if leftover.is_emptied else "changed"
            parts.append(Text(f"{leftover.path} is {done}; the old one is {shown['backup']}"))
        elif leftover.changes:
            parts.append(Text("Nothing was changed; --apply does it.", style="bold"))
        for number in leftover.doubtful:
            line = leftover.before.split("\n")[number - 1].strip()
            parts.append(
                Text(
                    f"{leftover.path}:{number} mentions flash_rl and is left to you: {line}",
                    style="yellow",
                )
            )
    parts.append(Text("\nTo turn FlashRL off:", style="bold"))
    parts += [Text(f"  {step['do']:<28} {step['effect']}") for step in data["turn_off"]]
    if data["variables"]:
        names = ", ".join(f"{name}={value}" for name, value in data["variables"].items())
        parts.append(Text(f"Set now: {names}"))
    return Group(*parts)
