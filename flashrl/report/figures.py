"""The report's figures, each drawn from the runs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from flashrl.errors import MissingDependencyError
from flashrl.report.records import Run
from flashrl.report.summary import mean_seconds
from flashrl.report.theme import COLORS, RC, color_of_part, color_of_run

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter
except ImportError as error:
    raise MissingDependencyError(
        "the report draws with matplotlib, which is not installed; pip install 'flashrl[report]'"
    ) from error

__all__ = ["Panel", "draw_panels"]

_SIZE = (4.7, 3.0)
_SQUARE = (3.4, 3.3)
_WINDOW = 5
_MAX_POINTS = 900
_NARROW_BAR = 0.09


@attrs.frozen(kw_only=True)
class Panel:
    """A figure and what to say of it.

    Args:
        name: Of its PNG file.
        title: A few words.
        caption: One sentence: what to see.
        section: ``"reward"``, ``"mismatch"``, ``"tokens"`` or ``"time"``.
        figure: Drawn.
    """

    name: str
    title: str
    caption: str
    section: str
    figure: Figure


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
        caption=f"Thin: every step. Bold: the mean of the last {_WINDOW}. Look whether the curves "
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
    figure, axes = _new(_SIZE)
    for index, run in drawn:
        color = color_of_run(index)
        for metric, style in (
            ("flashrl/ratio_max", {"linewidth": 1.8}),
            ("flashrl/ratio_p95", {"linewidth": 1.2, "linestyle": (0, (4, 2))}),
        ):
            steps, values = run.series(metric)
            label = run.title if metric.endswith("max") else None
            axes.plot(steps, values, color=color, label=label, **_marked(steps), **style)
    if bound:
        axes.axhline(bound, color=COLORS["muted"][0], linewidth=1, linestyle=(0, (1, 2)))
    _log_scale(axes)
    _finish(axes, "importance ratio trainer / rollout")
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
        figure, axes = _new(_SQUARE)
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
    timed = [(run, mean_seconds(run)) for run in runs]
    timed = [(run, seconds) for run, seconds in timed if seconds]
    if not timed:
        return
    figure, axes = _new((_SIZE[0] * 1.6, 0.75 + 0.5 * len(timed)))
    longest = max(seconds["total"] for _, seconds in timed)
    left = [0.0] * len(timed)
    for index, part in enumerate(name for name in timed[0][1] if name != "total"):
        widths = [seconds[part] for _, seconds in timed]
        axes.barh(range(len(timed)), widths, left=left, color=color_of_part(index), label=part)
        for row, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width > _NARROW_BAR * longest:
                axes.text(
                    start + width / 2,
                    row,
                    f"{width:.1f}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=COLORS["inside"][0],
                )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(timed)), [run.title for run, _ in timed])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean seconds a step")
    _legend(axes, len(timed[0][1]))
    yield Panel(
        name="time",
        title="Where a step's time goes",
        section="time",
        figure=figure,
        caption="Generate: the rollout engine. Sync: push the weights and quantize them. Score: "
        "log-probabilities for the correction. Train: loss, gradients, optimizer.",
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
    figure, axes = _new(_SIZE)
    for index, run in drawn:
        steps, values = run.series(metric)
        color = color_of_run(index)
        if smooth:
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.45)
            values = [_trailing_mean(values, end) for end in range(1, len(values) + 1)]
        axes.plot(steps, values, color=color, linewidth=1.8, label=run.title, **_marked(steps))
    decorate(axes)
    _finish(axes, label)
    yield Panel(figure=figure, **panel)


def _new(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    return figure, figure.add_subplot()


def _log_scale(axes: Axes) -> None:
    """Logarithmic, with plain numbers at 1, 2, 3 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes: Axes, label: str) -> None:
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, len(axes.get_lines()))


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, columnspacing=1.0)


def _marked(steps: Sequence[int]) -> dict[str, Any]:
    """A line of one point is invisible without a marker."""
    return {"marker": "o", "markersize": 4} if len(steps) == 1 else {}


def _trailing_mean(values: Sequence[float], end: int) -> float:
    window = values[max(0, end - _WINDOW) : end]
    return sum(window) / len(window)
