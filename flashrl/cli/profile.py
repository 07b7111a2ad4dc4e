"""``flashrl profile``: make a profile, show it, check it, compare it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashrl.cli._output import json_option, pass_json_on, print_data
from flashrl.cli._profiling import FUNCTIONS, ProfileRequest
from flashrl.errors import ProfileError, VerificationError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["command"]

_SHOWN = 12


@click.group("profile", invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("-m", "--model", metavar="PATH|NAME", help="The 16-bit checkpoint.")
@click.option(
    "-q",
    "-qm",
    "--quantized",
    metavar="PATH|NAME",
    help="Its 8-bit copy, as llm-compressor writes one.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The profile: .safetensors, or .pt as flash-llm-rl reads it.",
)
@click.option(
    "--fn",
    type=click.Choice(FUNCTIONS),
    default="int8",
    show_default=True,
    help="What it is for.",
)
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="JSONL",
    help="Prompts to run the model on, instead of a quantized copy.",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1),
    help="With --calibrate: how much moves into the weights.  [default: 0.5]",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    help="With --calibrate: tokens of a prompt to run.  [default: 2048]",
)
@click.option(
    "--static-scales/--no-static-scales",
    default=True,
    show_default=True,
    help="Keep the scales of this day too, for configurations with dynamic: false.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, /, *, as_json: bool, **options: Any) -> None:
    r"""Make a profile: smoothing factors, and scales that stay fixed.

    \b
    From a checkpoint and its quantized copy, read a tensor at a time:
      flashrl profile -m BASE -qm COPY -o profile.safetensors
    From activations, with no copy at all:
      flashrl profile -m BASE --calibrate prompts.jsonl --alpha 0.5 -o profile.safetensors

    A checkpoint is a folder or org/name on the hub.  Of an FP8 copy without -m the names alone are
    kept.  A line of the prompts is a string, or an object with prompt, text, messages or input_ids.
    """
    if ctx.invoked_subcommand is not None:
        pass_json_on(ctx)
        return
    request = ProfileRequest(**options)
    profile = request.make()
    request.save(profile)
    data = {"output": str(request.output), **_summarize(profile)}
    where = Text(f"\n{request.output}", style="bold")
    print_data(data, Group(_render(data), where), as_json=as_json)


@command.command("show")
@click.argument("file")
@json_option
def show(file: str, as_json: bool) -> None:
    """What a profile holds.  FILE is a path or org/name/file on the hub."""
    from flashrl.core.profiles.files import load_profile

    data = {"file": file, **_summarize(load_profile(file))}
    print_data(data, _render(data), as_json=as_json)


@command.command("validate")
@click.argument("file")
@click.option("-m", "--model", metavar="PATH|NAME", help="A checkpoint it should fit.")
@json_option
def validate(file: str, model: str | None, as_json: bool) -> None:
    """Check that a profile is safe, whole, and fits a model.

    Of the model the headers are read.  Exit code 1 if it is not.
    """
    from flashrl.core.hub import find_checkpoint, find_file
    from flashrl.core.profiles.checkpoints import Checkpoint
    from flashrl.core.profiles.files import load_profile

    path = find_file(file)
    checkpoint = Checkpoint.open(find_checkpoint(model)) if model else None
    fault = ""
    try:
        profile = load_profile(path)
        if checkpoint is not None:
            profile.check({name: header.shape for name, header in checkpoint.headers.items()})
    except ProfileError as error:
        fault = str(error)
    data = {"file": file, "model": model, "ok": not fault, "fault": fault}
    fits = f" and fits {model}" if model else ""
    verdict = Text(f"{file} is no good", "red") if fault else Text(f"{file} is whole{fits}")
    print_data(data, verdict, as_json=as_json)
    if fault:
        raise VerificationError(fault)


@command.command("diff")
@click.argument("first")
@click.argument("second")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-6,
    show_default=True,
    help="Largest relative difference that is none.",
)
@json_option
def diff(first: str, second: str, tolerance: float, as_json: bool) -> None:
    """How two profiles differ in what they do to a model; exit code 1 if they do."""
    from flashrl.core.profiles.files import load_profile
    from flashrl.core.profiles.summary import compare_profiles

    differences = compare_profiles(load_profile(first), load_profile(second), tolerance=tolerance)
    data = {
        "first": first,
        "second": second,
        "equal": not differences,
        "differences": [attrs.asdict(difference) for difference in differences],
    }
    table = Table("what", "of", "differs", box=None, header_style="bold")
    for difference in differences:
        table.add_row(difference.what, Text(difference.name), Text(difference.detail))
    print_data(data, table if differences else Text("no difference"), as_json=as_json)
    if differences:
        raise VerificationError(f"{first} and {second} differ in {len(differences)} places")


def _summarize(profile: Profile) -> dict[str, Any]:
    from flashrl.core.profiles.summary import summarize_profile

    return summarize_profile(profile)


def _render(summary: Mapping[str, Any]) -> Group:
    facts = Table(box=None, show_header=False)
    facts.add_column(style="bold")
    for label, value in (
        ("scheme", summary["scheme"]),
        ("base model", summary["base_model"] or "not said"),
        ("quantized model", summary["quantized_model"] or "none"),
        ("alpha", "not said" if summary["alpha"] is None else f"{summary['alpha']:g}"),
        ("weights to quantize", f"{summary['num_weights']:,}"),
        ("static scales", f"{summary['num_static_scales']:,}"),
        ("smoothed", f"{summary['num_smoothed']:,} norms and weights"),
    ):
        facts.add_row(label, Text(value))
    smoothing = summary["smoothing"]
    if not smoothing:
        return Group(facts)
    table = Table("smoothing factors of", box=None, header_style="bold")
    for heading in ("channels", "smallest", "median", "largest", "readers"):
        table.add_column(heading, justify="right")
    for source, factor in list(smoothing.items())[:_SHOWN]:
        spread = (f"{factor[which]:.3g}" for which in ("smallest", "median", "largest"))
        readers = str(len(factor["readers"]))
        table.add_row(Text(source), f"{factor['channels']:,}", *spread, readers)
    if len(smoothing) > _SHOWN:
        table.add_row(f"and {len(smoothing) - _SHOWN} more; --json has them all", style="dim")
    return Group(facts, Text(), table)
