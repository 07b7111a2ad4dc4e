"""The colours of the report, once for the page's style sheet and once for the figures.

A figure is drawn with the light colours; for the page each of them is replaced by its CSS variable,
so that one SVG serves light and dark.
"""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    *("COLORS", "NUM_RUN_COLORS", "RC"),
    *("color_of_part", "color_of_run", "css_variables", "render_svg"),
]

COLORS = {
    # name: (light, dark); runs and parts after Okabe and Ito, who chose for the colour-blind
    "page": ("#fdfdfc", "#14171a"),
    "card": ("#ffffff", "#1c2024"),
    "ink": ("#1d2329", "#e8eaed"),
    "muted": ("#5f6b76", "#9aa5b1"),
    "grid": ("#e4e7eb", "#2c3238"),
    "run-0": ("#6b7785", "#a3afbc"),
    "run-1": ("#0072b2", "#56b4e9"),
    "run-2": ("#d55e00", "#f08a4b"),
    "run-3": ("#009e73", "#2fc79c"),
    "run-4": ("#aa5f93", "#d48fc0"),
    "run-5": ("#b8860b", "#e3b341"),
    "run-6": ("#6a51a3", "#a893dd"),
    "run-7": ("#8c564b", "#c9958a"),
    "run-8": ("#17869b", "#4fc3d9"),
    "part-0": ("#3f6f9f", "#5b8fc4"),
    "part-1": ("#e0a02f", "#e9b75a"),
    "part-2": ("#7d9f6c", "#93b981"),
    "part-3": ("#b9c0c8", "#59626b"),
    "inside": ("#fffffe", "#101214"),
}
NUM_RUN_COLORS = 9

RC = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": COLORS["ink"][0],
    "axes.labelcolor": COLORS["muted"][0],
    "axes.edgecolor": COLORS["grid"][0],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "grid.color": COLORS["grid"][0],
    "grid.linewidth": 0.8,
    "xtick.color": COLORS["muted"][0],
    "ytick.color": COLORS["muted"][0],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "flashrl",
    "figure.constrained_layout.use": True,
}
"""matplotlib's settings for every figure."""


def color_of_run(index: int) -> str:
    """A run's colour, or an arm's; they repeat after the ninth."""
    return COLORS[f"run-{index % NUM_RUN_COLORS}"][0]


def color_of_part(index: int) -> str:
    """The colour of a part of a step."""
    return COLORS[f"part-{index}"][0]


def css_variables(*, dark: bool) -> str:
    """The colours as CSS custom properties."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLORS.items())


def render_svg(figure: Figure, *, name: str, label: str) -> str:
    """A figure as an ``<svg>`` element for the page: no reference leaves the file.

    Args:
        figure: Drawn under :data:`RC`.
        name: Unique on the page; keeps the ids of two figures apart.
        label: Read aloud instead of the picture.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    _, _, drawing = buffer.getvalue().partition("<svg")
    tag, _, content = drawing.partition(">")
    [view_box] = re.findall(r'viewBox="[^"]*"', tag)
    content = re.sub(r"<metadata>.*?</metadata>", "", content, flags=re.DOTALL)
    content = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", content)
    content = content.replace("xlink:href", "href")
    for variable, (light, _) in COLORS.items():
        content = content.replace(light, f"var(--{variable})")
    return f'<svg role="img" aria-label="{html.escape(label)}" {view_box}>{content}'
