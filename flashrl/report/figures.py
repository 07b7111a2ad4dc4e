"""The figures of a few runs, each drawn from the runs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from flashrl.report.drawing import (
    SIZE,
    WINDOW,
    Panel,
    add_legend,
    finish,
    marked,
    new_axes,
    trailing_mean,
    use_log_scale,
)
from flashrl.report.records import Run
from flashrl.report.theme import COLORS, RC, color_of_part, color_of_run
from flashrl.report.timing import mean_seconds

__all__ = ["draw_panels", "draw_time"]

_SQUARE = (3.4, 3.3)
_MAX_POINTS = 900
_NARROW_BAR = 0.09
_MANY_SECONDS = 5.0


def draw_panels(runs: Sequence[Run]) -> list[Panel]:
    """Every figure that the runs have numbers for, in reading order."""
    with rc_context(RC):
        return [
            panel
            for draw in (_reward, _kl, _ess, _spread, _truncated, _tokens, _time)
            for panel in draw(runs)
        ]


def _reward(runs: Sequence[Run]) -> Iterator[Panel]:
    best = next((run.facts["best_reward"] for run in runs if "best_reward" in run.facts), None)

    def decorate(axes: Axes) -> None:
        if best is not None:
            axes.axhline(best, color=COLORS["muted"][0], linewidth=1, linestyle=(0, (2, 3)))
            axes.annotate(
                "best possible",
                (0, best),
                xycoords=("axes fraction", "data"),
                xytext=(4, -10),
                textcoords="offset points",
                color=COLORS["muted"][0],
                fontsize=8,
            )
        axes.set_ylim(bottom=0)

    yield from _curves(
        runs,
        "reward",
        name="reward",
        title="Reward",
        section="reward",
        label="mean reward of a step",
        caption=f"Thin: every step. Bold: the mean of the last {WINDOW}. Look whether the curves "
        "part by more than they wobble.",
        smooth=True,
        decorate=decorate,
    )


def _kl(runs: Sequence[Run]) -> Iterator[Panel]:
    yield from _curves(
        runs,
        "flashrl/kl",
        name="kl",
        title="Distance to the trainer",
        section="mismatch",
        label="KL(rollout ‖ trainer), nats a token",
        caption="How far the distribution that was sampled is from the one that is trained; lower "
        "is better.",
        decorate=lambda axes: axes.set_ylim(bottom=0),
    )


def _ess(runs: Sequence[Run]) -> Iterator[Panel]:
    def decorate(axes: Axes) -> None:
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    yield from _curves(
        runs,
        "flashrl/ess",
        name="ess",
        title="Effective sample size",
        section="mismatch",
        label="share of the batch's tokens",
        caption="What the batch is worth after weighting every token by its exact ratio; the gap "
        "to 100 % is the price of the mismatch.",
        decorate=decorate,
    )


def _spread(runs: Sequence[Run]) -> Iterator[Panel]:
    bound = next((run.facts["truncation"] for run in runs if run.facts.get("truncation")), None)
    drawn = [(index, run) for index, run in enumerate(runs) if run.values("flashrl/ratio_max")]
    if not drawn:
        return
    figure, axes = new_axes(SIZE)
    for index, run in drawn:
        color = color_of_run(index)
        for metric, style in (
            ("flashrl/ratio_max", {"linewidth": 1.8}),
            ("flashrl/ratio_p95", {"linewidth": 1.2, "linestyle": (0, (4, 2))}),
        ):
            steps, values = run.series(metric)
            label = run.title if metric.endswith("max") else None
            axes.plot(steps, values, color=color, label=label, **marked(steps), **style)
    if bound:
        axes.axhline(bound, color=COLORS["muted"][0], linewidth=1, linestyle=(0, (1, 2)))
    use_log_scale(axes)
    finish(axes, "importance ratio trainer / rollout")
    dotted = f"; the dotted line is the truncation at {bound:g}" if bound else ""
    yield Panel(
        name="ratio",
        title="Tail of the ratio",
        section="mismatch",
        figure=figure,
        caption="Solid: the largest ratio of a step. Dashed: its 95th percentile. A mean near 1 "
        f"hides both{dotted}.",
    )


def _truncated(runs: Sequence[Run]) -> Iterator[Panel]:
    corrected = [
        run if run.facts.get("truncation") else attrs.evolve(run, steps=()) for run in runs
    ]

    def decorate(axes: Axes) -> None:
        axes.set_ylim(0, max(0.01, axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))

    yield from _curves(
        corrected,
        "flashrl/frac_truncated",
        name="truncated",
        title="Truncated weights",
        section="mismatch",
        label="share of the batch's tokens",
        caption="How many tokens had a ratio above the bound, and were weighted by the bound: "
        "the bias that buys a bounded variance.",
        decorate=decorate,
    )


def _tokens(runs: Sequence[Run]) -> Iterator[Panel]:
    for index, run in enumerate(runs):
        if not run.tokens:
            continue
        shown = run.tokens[:: math.ceil(len(run.tokens) / _MAX_POINTS)]
        figure, axes = new_axes(_SQUARE)
        lowest = min(-1.0, *(min(pair) for pair in shown))
        bound = run.facts.get("truncation")
        if bound:
            shift = math.log(bound)
            axes.plot(
                [lowest, 0],
                [lowest + shift, shift],
                color=COLORS["muted"][0],
                linewidth=1,
                linestyle=(0, (1, 2)),
            )
        axes.plot([lowest, 0], [lowest, 0], color=COLORS["muted"][0], linewidth=1)
        axes.plot(
            [log_mu for _, log_mu in shown],
            [log_pi for log_pi, _ in shown],
            linestyle="none",
            marker="o",
            markersize=3.2,
            markeredgewidth=0,
            alpha=0.35,
            color=color_of_run(index),
        )
        axes.set(
            xlim=(lowest * 1.03, -lowest * 0.03),
            ylim=(lowest * 1.03, -lowest * 0.03),
            aspect="equal",
            xlabel="log-probability in the rollout, nats",
            ylabel="in the trainer, nats",
        )
        dotted = "; above the dotted line the weight is cut" if bound else ""
        yield Panel(
            name=f"tokens-{run.name}",
            title=f"Token by token: {run.title}",
            section="tokens",
            figure=figure,
            caption=f"{len(shown):,} of {len(run.tokens):,} sampled tokens; on the line both sides "
            f"agree{dotted}.",
        )


def _time(runs: Sequence[Run]) -> Iterator[Panel]:
    timed = [(run.title, seconds) for run in runs if (seconds := mean_seconds(run))]
    if timed:
        yield draw_time(timed, name="time", section="time")


def draw_time(timed: Sequence[tuple[str, Mapping[str, float]]], **panel: Any) -> Panel:
    """A bar for each row, cut into the parts of a step.

    Args:
        timed: Rows of a title and the seconds of each part, with their ``total``; at least one.
        **panel: Further arguments of :class:`~flashrl.report.drawing.Panel`.
    """
    figure, axes = new_axes((SIZE[0] * 1.6, 0.75 + 0.5 * len(timed)))
    longest = max(seconds["total"] for _, seconds in timed)
    decimals = 1 if longest >= _MANY_SECONDS else 2
    left = [0.0] * len(timed)
    for index, part in enumerate(name for name in timed[0][1] if name != "total"):
        widths = [seconds[part] for _, seconds in timed]
        axes.barh(range(len(timed)), widths, left=left, color=color_of_part(index), label=part)
        for row, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width > _NARROW_BAR * longest:
                axes.text(
                    start + width / 2,
                    row,
                    f"{width:.{decimals}f}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=COLORS["inside"][0],
                )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(timed)), [title for title, _ in timed])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean seconds a step")
    add_legend(axes, len(timed[0][1]))
    return Panel(
        title="Where a step's time goes",
        figure=figure,
        caption="Generate: the rollout engine. Sync: push the weights and quantize them. Score: "
        "log-probabilities for the correction. Train: loss, gradients, optimizer.",
        **panel,
    )


def _curves(
    runs: Sequence[Run],
    metric: str,
    *,
    label: str,
    smooth: bool = False,
    decorate: Callable[[Axes], object],
    **panel: Any,
) -> Iterator[Panel]:
    """A metric against the step, one line a run; nothing if no run has it."""
    drawn = [(index, run) for index, run in enumerate(runs) if run.values(metric)]
    if not drawn:
        return
    figure, axes = new_axes(SIZE)
    for index, run in drawn:
        steps, values = run.series(metric)
        color = color_of_run(index)
        if smooth:
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.45)
            values = [trailing_mean(values, end) for end in range(1, len(values) + 1)]
        axes.plot(steps, values, color=color, linewidth=1.8, label=run.title, **marked(steps))
    decorate(axes)
    finish(axes, label)
    yield Panel(figure=figure, **panel)
