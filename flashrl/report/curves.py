"""Which curves an experiment's report shows, and what they are over several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from flashrl.report.drawing import WINDOW, trailing_mean
from flashrl.report.records import Run

__all__ = ["JUDGED", "OTHERS", "Band", "Curve", "compute_band"]

_MAX_POINTS = 60


@attrs.frozen(kw_only=True)
class Band:
    """A metric over the steps of several runs.

    Args:
        steps: Those that any run has a value for.
        mean: Of the runs that have one.
        low: The lowest of them.
        high: The highest of them.
    """

    steps: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@attrs.frozen(kw_only=True)
class Curve:
    """A metric against the step, and how it is drawn.

    Args:
        metric: In the steps of the runs.
        title: A few words.
        label: Of its axis.
        caption: What to see.
        smooth: Take each run's mean over its last few values before.
        log: On a logarithmic axis.
        percent: Its axis is in percent.
        from_zero: Its axis begins at 0.
    """

    metric: str
    title: str
    label: str
    caption: str
    smooth: bool = True
    log: bool = False
    percent: bool = False
    from_zero: bool = False


JUDGED: Sequence[Curve] = (
    Curve(
        metric="accuracy",
        title="Held-out accuracy",
        label="accuracy",
        caption="Greedy answers to problems that are never trained on.",
        smooth=False,
        from_zero=True,
    ),
    Curve(
        metric="reward",
        title="Reward",
        label="reward",
        caption=f"Of the rollouts; each run is smoothed over {WINDOW} steps.",
        from_zero=True,
    ),
)
"""What the arms are judged by."""

OTHERS: Sequence[Curve] = (
    Curve(
        metric="flashrl/kl",
        title="Distance to the trainer",
        label="KL(rollout ‖ trainer), nats a token",
        caption="How far the distribution that was sampled is from the one that is trained.",
        log=True,
    ),
    Curve(
        metric="flashrl/ess",
        title="Effective sample size",
        label="share of the tokens",
        caption="What a rollout is worth after weighting every token by its exact ratio.",
        percent=True,
    ),
    Curve(
        metric="flashrl/ratio_max",
        title="Largest ratio",
        label="importance ratio trainer / rollout",
        caption="Of all tokens of a rollout, before any bound.",
        log=True,
    ),
    Curve(
        metric="flashrl/frac_truncated",
        title="Truncated weights",
        label="share of the tokens",
        caption="Weighted by the bound instead of by their ratio.",
        percent=True,
        from_zero=True,
    ),
    Curve(
        metric="flashrl/frac_dropped",
        title="Dropped tokens",
        label="share of the tokens",
        caption="Not trained on at all.",
        percent=True,
        from_zero=True,
    ),
    Curve(
        metric="entropy",
        title="Entropy",
        label="nats a token",
        caption="Of the trainer's distribution; a policy that collapses loses it.",
        from_zero=True,
    ),
    Curve(
        metric="grad_norm",
        title="Norm of the gradient",
        label="before clipping",
        caption="Spikes are steps that a few tokens dominate.",
        log=True,
    ),
    Curve(
        metric="completions/mean_length",
        title="Length of the answers",
        label="tokens",
        caption="Mean over a rollout. The mismatch of a sequence grows with it.",
        from_zero=True,
    ),
)
"""What explains it."""


def compute_band(runs: Sequence[Run], metric: str, *, smooth: bool) -> Band:
    """Mean, lowest and highest over the runs, step by step.

    Args:
        runs: Of one arm under one condition.
        metric: In their steps.
        smooth: Take each run's mean over its last few values before.
    """
    columns: dict[int, list[float]] = {}
    for run in runs:
        steps, values = run.series(metric)
        if smooth:
            values = [trailing_mean(values, end) for end in range(1, len(values) + 1)]
        for step, value in zip(steps, values, strict=True):
            columns.setdefault(step, []).append(value)
    steps = sorted(columns)
    stride = max(1, math.ceil(len(steps) / _MAX_POINTS))
    steps = steps[::-1][::stride][::-1]  # the last one stays
    return Band(
        steps=steps,
        mean=[sum(columns[step]) / len(columns[step]) for step in steps],
        low=[min(columns[step]) for step in steps],
        high=[max(columns[step]) for step in steps],
    )
