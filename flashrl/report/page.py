"""The report: one HTML file that needs nothing else, and the figures as PNG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashrl
from flashrl.errors import MissingDependencyError
from flashrl.report.groups import is_experiment
from flashrl.report.records import Run
from flashrl.report.summary import summarize
from flashrl.report.theme import NUM_RUN_COLORS, css_variables, render_svg

if TYPE_CHECKING:
    from flashrl.report.drawing import Panel
    from flashrl.report.layout import Layout, Section

__all__ = ["write_report"]

_DPI = 160


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write ``report.html`` and a PNG a figure.

    Args:
        runs: As read from disk, at least one; unfinished ones too.  If each says its arm, its
            condition and its seed, the arms are compared.
        folder: Where; made if it does not exist.

    Returns:
        The page's path.

    Raises:
        MissingDependencyError: What it is drawn with is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - what draws imports it without a word
        from jinja2 import Environment
    except ImportError as error:
        raise MissingDependencyError(
            f"the report needs {error.name}, which is not installed; pip install 'flashrl[report]'"
        ) from error

    folder.mkdir(parents=True, exist_ok=True)
    layout = _lay_out(runs)
    source = resources.files("flashrl.report").joinpath("template.html").read_text("utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    page = environment.from_string(source).render(**_content(runs, layout))
    for section in layout.sections:
        for panel in section.panels:
            _save_picture(panel, folder)
    return _replace(folder / "report.html", page)


def _lay_out(runs: Sequence[Run]) -> Layout:
    if is_experiment(runs):
        from flashrl.report.experiment import lay_out_experiment

        return lay_out_experiment(runs)
    from flashrl.report.layout import lay_out_runs

    return lay_out_runs(runs)


def _content(runs: Sequence[Run], layout: Layout) -> dict[str, Any]:
    """What the template needs."""
    return {
        "heading": runs[0].facts.get("heading", "Training report"),
        "lead": runs[0].facts.get("lead", ""),
        "findings": summarize(runs)["findings"],
        "sections": [_show(section) for section in layout.sections],
        "set_up": layout.set_up,
        "num_colors": NUM_RUN_COLORS,
        "light": css_variables(dark=False),
        "dark": css_variables(dark=True),
        "version": flashrl.__version__,
    }


def _show(section: Section) -> dict[str, Any]:
    from markupsafe import Markup  # Jinja2's own

    return {
        "key": section.key,
        "title": section.title,
        "text": section.text,
        "tables": section.tables,
        "legend": section.legend,
        "figures": [
            # Our own drawing: matplotlib has escaped its text.
            (panel, Markup(render_svg(panel.figure, name=panel.name, label=panel.title)))  # noqa: S704
            for panel in section.panels
        ],
    }


def _save_picture(panel: Panel, folder: Path) -> None:
    """On its own, a picture needs its title and its key."""
    from matplotlib.lines import Line2D

    panel.figure.suptitle(panel.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    if panel.key:
        lines = [Line2D([], [], color=color, label=title) for title, color in panel.key]
        panel.figure.legend(
            handles=lines, loc="outside lower center", ncols=2, fontsize=7.5, frameon=False
        )
    panel.figure.savefig(folder / f"{panel.name}.png", dpi=_DPI, facecolor="white")


def _replace(path: Path, text: str) -> Path:
    """Write a file so that it is whole at any time: the old one, or the new one."""
    scratch = path.with_suffix(".partial")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
    return path
