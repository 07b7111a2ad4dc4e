"""The report: one HTML file that needs nothing else, and the figures as PNG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flashrl
from flashrl.errors import MissingDependencyError
from flashrl.report.records import Run
from flashrl.report.summary import summarize
from flashrl.report.table import describe_set_up, tabulate
from flashrl.report.theme import css_variables, render_svg

if TYPE_CHECKING:
    from flashrl.report.figures import Panel

__all__ = ["write_report"]

_SECTIONS = {
    "reward": ("What was learned", ""),
    "mismatch": (
        "What 8 bit cost, and what the correction did",
        "The rollout engine samples from its own distribution μ, the trainer works on its policy "
        "π. The importance ratio π/μ of each sampled token measures the gap; truncated importance "
        "sampling weights the token by it, up to a bound.",
    ),
    "tokens": ("Token by token", ""),
    "time": ("Where the time went", ""),
}
"""Title and introduction of the page's parts, by the ``section`` of their panels."""

_DPI = 160


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write ``report.html`` and a PNG a figure.

    Args:
        runs: As read from disk, at least one; unfinished ones too.
        folder: Where; made if it does not exist.

    Returns:
        The page's path.

    Raises:
        MissingDependencyError: matplotlib or Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise MissingDependencyError(
            "the report needs Jinja2, which is not installed; pip install 'flashrl[report]'"
        ) from error
    from flashrl.report.figures import draw_panels

    folder.mkdir(parents=True, exist_ok=True)
    panels = draw_panels(runs)
    source = resources.files("flashrl.report").joinpath("template.html").read_text("utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    page = environment.from_string(source).render(**_content(runs, panels))
    for panel in panels:  # on its own, a picture needs its title
        panel.figure.suptitle(panel.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
        panel.figure.savefig(folder / f"{panel.name}.png", dpi=_DPI, facecolor="white")
    return _replace(folder / "report.html", page)


def _content(runs: Sequence[Run], panels: Sequence[Panel]) -> dict[str, Any]:
    """What the template needs."""
    from markupsafe import Markup  # Jinja2's own

    summary = summarize(runs)
    figures = [
        # Our own drawing: matplotlib has escaped its text.
        (panel, Markup(render_svg(panel.figure, name=panel.name, label=panel.title)))  # noqa: S704
        for panel in panels
    ]
    sections = [
        {"key": key, "title": title, "text": text, "figures": chosen}
        for key, (title, text) in _SECTIONS.items()
        if (chosen := [item for item in figures if item[0].section == key])
    ]
    return {
        "heading": runs[0].facts.get("heading", "Training report"),
        "lead": runs[0].facts.get("lead", ""),
        "findings": summary["findings"],
        "runs": runs,
        "rows": tabulate(summary["runs"]),
        "sections": sections,
        "set_up": describe_set_up(runs),
        "light": css_variables(dark=False),
        "dark": css_variables(dark=True),
        "version": flashrl.__version__,
    }


def _replace(path: Path, text: str) -> Path:
    """Write a file so that it is whole at any time: the old one, or the new one."""
    scratch = path.with_suffix(".partial")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
    return path
