"""What every figure of the report is drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

__all__ = [
    *("SIZE", "WINDOW", "Panel", "add_legend", "finish", "marked", "new_axes"),
    *("trailing_mean", "use_log_scale"),
]

SIZE = (4.7, 3.0)
"""Of a figure, in inches."""

WINDOW = 5
"""Values that a smoothed curve averages over."""


@attrs.frozen(kw_only=True)
class Panel:
    """A figure and what to say of it.

    Args:
        name: Of its PNG file.
        title: A few words.
        caption: One sentence: what to see.
        section: The part of the page it belongs to.
        figure: Drawn.
        wide: Takes the width of the page.
        key: What each colour stands for, where the page says it once for many figures; a picture
            on its own says it itself.
    """

    name: str
    title: str
    caption: str
    section: str
    figure: Figure
    wide: bool = False
    key: Sequence[tuple[str, str]] = ()


def new_axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    return figure, figure.add_subplot()


def use_log_scale(axes: Axes) -> None:
    """Logarithmic, with plain numbers at 1, 2, 3 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def finish(axes: Axes, label: str) -> None:
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes, len(axes.get_lines()))


def add_legend(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, columnspacing=1.0)


def marked(steps: Sequence[int]) -> dict[str, Any]:
    """A line of one point is invisible without a marker."""
    return {"marker": "o", "markersize": 4} if len(steps) == 1 else {}


def trailing_mean(values: Sequence[float], end: int) -> float:
    window = values[max(0, end - WINDOW) : end]
    return sum(window) / len(window)
