"""``flashrl report``: draw a folder of training runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashrl.cli._output import json_option, print_data
from flashrl.report import read_runs, summarize, write_report
from flashrl.report.table import tabulate

__all__ = ["command", "draw", "show"]


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for report.html and the PNGs.  [default: RUN_DIR]",
)
@json_option
def command(run_dir: Path, output: Path | None, as_json: bool) -> None:
    """Draw the runs that RUN_DIR holds as one self-contained HTML file, and PNGs.

    They are what `flashrl demo` wrote, or what verl, OpenRLHF or TRL logged for TensorBoard, one
    run a folder.
    """
    show(draw(run_dir, output or run_dir), as_json=as_json)


def draw(run_dir: Path, output: Path) -> dict[str, Any]:
    """Read the runs of a folder and write their report.

    Returns:
        The numbers and findings, with the page's path as ``report``.
    """
    runs = read_runs(run_dir)
    page = write_report(runs, output)
    return {**summarize(runs), "report": str(page)}


def show(summary: dict[str, Any], *, as_json: bool) -> None:
    """Print what :func:`draw` returned: findings, numbers, and where the page is."""
    table = Table("", *(run["title"] for run in summary["runs"]), box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cells in tabulate(summary["runs"]):
        table.add_row(label, *cells)
    findings = [
        Text.assemble("• ", (finding["headline"], "bold"), " ", finding["text"])
        for finding in summary["findings"]
    ]
    where = Text(f"\n{summary['report']}", style="bold")
    print_data(summary, Group(*findings, Text(), table, where), as_json=as_json)
