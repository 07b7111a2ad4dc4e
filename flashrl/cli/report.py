"""``flashrl report``: draw a folder of training runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from rich import table as rich_table
from rich.console import Group
from rich.text import Text

from flashrl.cli._output import json_option, print_data
from flashrl.report import Run, read_runs, summarize, write_report
from flashrl.report.groups import is_experiment
from flashrl.report.table import Table, tabulate

__all__ = ["Drawn", "command", "draw", "show"]


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
    run a folder.  Runs that say their arm, condition and seed are compared, seed by seed.
    """
    show(draw(run_dir, output or run_dir), as_json=as_json)


@attrs.frozen(kw_only=True)
class Drawn:
    """A report that was written, as it is printed.

    Args:
        summary: The numbers and findings, with the page's path as ``report``.
        tables: For people, in place of most of the numbers.
    """

    summary: dict[str, Any]
    tables: Sequence[Table]


def draw(run_dir: Path, output: Path) -> Drawn:
    """Read the runs of a folder and write their report."""
    runs = read_runs(run_dir)
    page = write_report(runs, output)
    summary = summarize(runs)
    tables = _compare(runs) if is_experiment(runs) else [tabulate(summary["runs"])]
    return Drawn(summary={**summary, "report": str(page)}, tables=tables)


def _compare(runs: Sequence[Run]) -> list[Table]:
    """Each condition's table, with the condition in its corner; and that of the corrections."""
    from flashrl.report.comparison import compare_groups
    from flashrl.report.verdicts import tabulate_condition, tabulate_corrections

    comparison = compare_groups(runs)
    conditions = {group.condition: group.condition_title for group in comparison.groups}
    corrections = tabulate_corrections(comparison)
    return [
        *(
            attrs.evolve(tabulate_condition(comparison, name, explain=False), corner=title)
            for name, title in conditions.items()
        ),
        *([] if corrections is None else [corrections]),
    ]


def show(drawn: Drawn, *, as_json: bool) -> None:
    """Print findings, tables, and where the page is; or all the numbers."""
    summary = drawn.summary
    findings = [
        Text.assemble("• ", (finding["headline"], "bold"), " ", finding["text"])
        for finding in summary["findings"]
    ]
    where = Text(f"\n{summary['report']}", style="bold")
    shown = [part for table in drawn.tables for part in (Text(), _render(table))]
    print_data(summary, Group(*findings, *shown, where), as_json=as_json)


def _render(table: Table) -> rich_table.Table:
    rendered = rich_table.Table(box=None, header_style="bold")
    rendered.add_column(Text(table.corner))
    for heading in table.columns:
        rendered.add_column(Text(heading.text), justify="right")
    for heading, cells in table.rows:
        rendered.add_row(Text(heading.text), *cells)
    return rendered
