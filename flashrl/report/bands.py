"""The figures of an experiment: curves over seeds, histograms, and how each arm ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flashrl.report.comparison import Comparison, Test
from flashrl.report.curves import JUDGED, OTHERS, Curve, compute_band
from flashrl.report.drawing import SIZE, Panel, use_log_scale
from flashrl.report.figures import draw_time
from flashrl.report.groups import Group
from flashrl.report.theme import COLORS, RC, color_of_run
from flashrl.report.timing import mean_parts

__all__ = ["draw_condition", "draw_differences"]

_COLUMNS = 3
_CELL = (3.0, 2.1)


def draw_differences(comparison: Comparison) -> list[Panel]:
    """Where every arm ended, less what it is compared with; none without several seeds."""
    drawn = [
        test
        for test in comparison.tests
        if not test.baseline.baselines and math.isfinite(test.difference.half_width)
    ]
    if not drawn:
        return []
    arms = {test.group.index: test.group.title for test in drawn}
    rows = {index: row for row, index in enumerate(sorted(arms))}
    roots = dict.fromkeys(test.baseline.title for test in drawn)
    conditions = list(dict.fromkeys(test.group.condition for test in drawn))
    with rc_context(RC):
        figure, cells = _grid(len(conditions), (_CELL[0], 0.6 + 0.24 * len(rows)), sharey=True)
        for axes, condition in zip(cells, conditions, strict=True):
            _draw_forest(axes, [t for t in drawn if t.group.condition == condition], rows)
            axes.set_yticks(list(rows.values()), [arms[index] for index in rows], fontsize=8.5)
    return [
        Panel(
            name="differences",
            title=f"Final {comparison.metric}, less that of {', '.join(roots)} with the same seed",
            caption="Dot: mean over the seeds, filled where the test finds it beyond chance. Bar: "
            "its 95 % interval. One that crosses 0 is no proof of equality: it shows how large a "
            "difference may still be.",
            section="differences",
            figure=figure,
            wide=True,
        )
    ]


def draw_condition(groups: Sequence[Group]) -> list[Panel]:
    """Every figure that the runs under one condition have numbers for."""
    with rc_context(RC):
        return [
            *(panel for curve in JUDGED for panel in _multiples(groups, curve)),
            *(panel for curve in OTHERS for panel in _overlay(groups, curve)),
            *_histograms(groups),
            *_time(groups),
        ]


def _draw_forest(axes: Axes, tests: Sequence[Test], rows: Mapping[int, int]) -> None:
    axes.axvline(0, color=COLORS["muted"][0], linewidth=1)
    for test in tests:
        row, color = rows[test.group.index], color_of_run(test.group.index)
        axes.plot([test.difference.low, test.difference.high], [row, row], color=color, linewidth=2)
        filling = color if test.decided else COLORS["card"][0]
        axes.plot(test.difference.mean, row, "o", color=color, markerfacecolor=filling)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="y", visible=False)
    axes.set_title(tests[0].group.condition_title)


def _multiples(groups: Sequence[Group], curve: Curve) -> Iterator[Panel]:
    """Each arm in axes of its own, before what it is compared with."""
    drawn = [group for group in groups if any(run.values(curve.metric) for run in group.runs)]
    roots = [group for group in drawn if not group.baselines]
    shown = [group for group in drawn if group.baselines] or roots
    if not drawn:
        return
    figure, cells = _grid(len(shown), _CELL, sharey=True)
    for axes, group in zip(cells, shown, strict=True):
        for each in [*(root for root in roots if root is not group), group]:
            _draw_band(axes, each, curve)
        axes.set_title(group.title)
        _decorate(axes, curve)
    figure.supxlabel("optimizer step", fontsize=9, color=COLORS["muted"][0])
    yield _panel(
        figure,
        curve,
        groups,
        wide=True,
        behind=" Grey: " + ", ".join(root.title for root in roots) + "." if roots else "",
    )


def _overlay(groups: Sequence[Group], curve: Curve) -> Iterator[Panel]:
    """All arms in the same axes; none if all is zero, for that is what was not asked for."""
    values = [value for group in groups for run in group.runs for value in run.values(curve.metric)]
    if not any(values):
        return
    figure = Figure(figsize=SIZE)
    axes = figure.add_subplot()
    for group in groups:
        _draw_band(axes, group, curve)
    _decorate(axes, curve)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(curve.label)
    yield _panel(figure, curve, groups)


def _panel(
    figure: Figure, curve: Curve, groups: Sequence[Group], *, wide: bool = False, behind: str = ""
) -> Panel:
    condition = groups[0].condition
    name = curve.metric.rpartition("/")[2].replace("_", "-")
    return Panel(
        name=f"{condition}-{name}",
        title=curve.title,
        caption=curve.caption + behind,
        section=condition,
        figure=figure,
        wide=wide,
        key=_key(groups),
    )


def _draw_band(axes: Axes, group: Group, curve: Curve) -> None:
    band = compute_band(group.runs, curve.metric, smooth=curve.smooth)
    color = color_of_run(group.index)
    axes.fill_between(band.steps, band.low, band.high, color=color, alpha=0.18, linewidth=0)
    marker = "o" if len(band.steps) == 1 else None
    axes.plot(band.steps, band.mean, color=color, linewidth=1.6, marker=marker, markersize=4)


def _decorate(axes: Axes, curve: Curve) -> None:
    if curve.log:
        use_log_scale(axes)
    if curve.from_zero:
        axes.set_ylim(bottom=0)
    if curve.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def _histograms(groups: Sequence[Group]) -> Iterator[Panel]:
    """The ratio at the first, the middle and the last rollout, of all seeds together."""
    steps = sorted({h.step for group in groups for run in group.runs for h in run.histograms})
    if not steps:
        return
    figure, cells = _grid(len(steps), _CELL, sharey=True)
    for axes, step in zip(cells, steps, strict=True):
        for group in groups:
            found = [h for run in group.runs for h in run.histograms if h.step == step]
            found = [h for h in found if h.edges == found[0].edges and any(h.counts)]
            if found:
                counts = np.sum([h.counts for h in found], axis=0)
                share = counts / counts.sum()
                color = color_of_run(group.index)
                axes.stairs(np.where(share > 0, share, np.nan), found[0].edges, color=color)
        axes.set_yscale("log")
        axes.set_title(f"Step {step}")
    figure.supxlabel("log ratio trainer / rollout, nats", fontsize=9, color=COLORS["muted"][0])
    yield Panel(
        name=f"{groups[0].condition}-histograms",
        title="The ratio at the start, half-way and at the end",
        caption="Share of the tokens in each bin, of all seeds together, on a logarithmic scale, "
        "for it is the tails that hurt. At 0 rollout and trainer agree; the outermost bins hold "
        "everything beyond.",
        section=groups[0].condition,
        figure=figure,
        wide=True,
        key=_key(groups),
    )


def _time(groups: Sequence[Group]) -> Iterator[Panel]:
    timed = [(group.title, parts) for group in groups if (parts := mean_parts(group.runs))]
    if timed:
        condition = groups[0].condition
        yield draw_time(timed, name=f"{condition}-time", section=condition, wide=True)


def _grid(
    count: int, cell: tuple[float, float], *, sharey: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    """Axes in rows of a few; what would be left over in the last row is not there."""
    columns = min(_COLUMNS, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(columns * cell[0], rows * cell[1] + 0.3))
    cells = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey).flatten()
    for axes in cells[count:]:
        axes.remove()
    for axes in cells[max(0, count - columns) : count]:
        axes.tick_params(labelbottom=True)
    return figure, list(cells[:count])


def _key(groups: Sequence[Group]) -> Sequence[tuple[str, str]]:
    titles = {group.index: group.title for group in groups}
    return [(title, color_of_run(index)) for index, title in sorted(titles.items())]
