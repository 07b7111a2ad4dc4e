"""What a report says in words: sentences made from the numbers, and only from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flashrl.report.records import Run

__all__ = ["find", "last_quarter", "show_small"]

Summary = Mapping[str, Any]
Finding = tuple[str, str]
_BUSY_CPU_SHARE = 0.8
_SMALLEST = 0.0001


def find(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """Findings for people, each left out where its numbers are missing.

    Args:
        runs: The runs.
        summaries: What :func:`flashrl.report.summary.summarize_run` gave for each.

    Returns:
        ``headline`` and ``text`` of each.
    """
    finders: Sequence[Callable[[Sequence[Run], Sequence[Summary]], Iterator[Finding]]] = (
        _unfinished,
        _mismatch,
        _truncation,
        _reward,
        _comparison,
        _time,
        _proof,
    )
    return [
        {"headline": headline, "text": " ".join(text.split())}
        for finder in finders
        for headline, text in finder(runs, summaries)
    ]


def last_quarter(values: Sequence[float]) -> Sequence[float]:
    """The last quarter of a run, rounded up; empty only for an empty run."""
    return values[len(values) - math.ceil(len(values) / 4) :]


def show_small(value: float) -> str:
    """A number of which only two digits matter, and none under 0.0001."""
    return f"{value:.2g}" if value >= _SMALLEST else f"under {_SMALLEST}"


def _unfinished(_: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    parts = [
        f"{s['title']} {s['status']} after {s['steps_done']} of {s['steps_planned'] or '?'} steps"
        for s in summaries
        if s["status"] not in ("complete", "logged")
    ]
    if parts:
        yield "This report is partial.", f"{'; '.join(parts)}."


def _mismatch(_: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    plain, low = _plain_and_low(summaries)
    if low is None or None in (low["kl"], low["ess"], low["ratio_sd"], low["ratio_max"]):
        return
    name = str(low["scheme"]).upper()
    text = f"""The rollouts leave the trainer's policy by a KL of {show_small(low["kl"])} nats a
        token; the importance ratio has a standard deviation of {show_small(low["ratio_sd"])} and
        was {low["ratio_max"]:.1f} at most."""
    if plain is not None and plain["kl"] is not None:
        text += f""" {plain["title"]}: {show_small(plain["kl"])} nats,
            {show_small(plain["ratio_sd"])}, {plain["ratio_max"]:.1f}, and {plain["ess"]:.0%}."""
    yield f"In {name} a batch was worth {low['ess']:.0%} of its tokens.", text


def _truncation(runs: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    for run, s in zip(runs, summaries, strict=True):
        bound = run.facts.get("truncation")
        if bound is None or s["frac_truncated"] is None:
            continue
        if s["frac_truncated"] == 0:
            yield (
                "The correction cut no weight.",
                f"No ratio exceeded {bound:g}, so every token was weighted by its exact ratio.",
            )
        else:
            yield (
                f"The correction cut {s['frac_truncated']:.1%} of the weights.",
                f"""Those tokens had a ratio above {bound:g} and were weighted by {bound:g}; all
                others by their exact ratio.""",
            )
        return


def _reward(_: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    known = [s for s in summaries if s["reward_start"] is not None]
    if not known:
        return
    rises = ", ".join(
        f"{s['reward_start']:.2f} to {s['reward_end']:.2f} ({s['title']})" for s in known
    )
    best = known[0]["reward_best"]
    of_best = f"; the best answer earns {best:g}" if best is not None else ""
    learned = sum(s["reward_end"] > s["reward_start"] for s in known)
    headline = {len(known): "The reward rose.", 0: "The reward did not rise."}.get(
        learned, f"The reward rose in {learned} of {len(known)} runs."
    )
    yield headline, f"First quarter of the steps to the last: {rises}{of_best}."


def _comparison(runs: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    """Whether the correction shows in the reward; one seed proves nothing either way."""
    pairs = {
        s["correction"] == "off": (run, s)
        for run, s in zip(runs, summaries, strict=True)
        if s["scheme"] not in (None, "bf16") and s["reward_end"] is not None
    }
    if len(pairs) < 2:
        return
    (corrected_run, corrected), (plain_run, plain) = pairs[False], pairs[True]
    steps = min(corrected["steps_done"], plain["steps_done"])
    caveat = f"""{steps} steps of one seed are no evidence about quality either way; they show that
        the machinery works."""
    noise = 2 * math.hypot(_standard_error(corrected_run), _standard_error(plain_run))
    if not math.isfinite(noise):
        yield "Too few steps to compare with and without the correction.", caveat
        return
    difference = corrected["reward_end"] - plain["reward_end"]
    if abs(difference) <= noise:
        headline = "Without the correction the reward was as good."
    elif difference > 0:
        headline = "With the correction the reward was better."
    else:
        headline = "Without the correction the reward was better."
    yield (
        headline,
        f"""Last quarter, corrected less uncorrected: {difference:+.2f}, where two standard errors
        from step to step are {noise:.2f}. {caveat}""",
    )


def _time(_: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    plain, low = _plain_and_low(summaries)
    if low is None or not low["seconds_per_step"]:
        return
    spent = low["seconds_per_step"]
    text = f"""Of {spent["total"]:.1f} s a step ({low["title"]}), generating took
        {spent["generate"]:.1f} s, scoring the tokens {spent["score"]:.1f} s and training
        {spent["train"]:.1f} s."""
    shares = [s["cpu_share"] or 0.0 for s in (plain, low) if s is not None]
    if 0 < min(shares) < _BUSY_CPU_SHARE:
        text += f""" The machine was busy with other work, and gave a run as little as
            {min(shares):.0%} of the CPU time it asked for: these times say little."""
    elif plain is not None and min(shares) > 0 and plain["seconds_per_step"].get("generate"):
        factor = plain["seconds_per_step"]["generate"] / max(spent["generate"], 1e-9)
        text += f""" Generation ran at {factor:.2f} times the speed of the first run's here; what to
            expect of a GPU, `flashrl predict` says."""
    yield f"Pushing and quantizing the weights took {spent['sync']:.2f} s a step.", text


def _proof(_: Sequence[Run], summaries: Sequence[Summary]) -> Iterator[Finding]:
    proven = [s for s in summaries if s["verified_tensors"]]
    if proven:
        yield (
            f"All {proven[0]['verified_tensors']} weights were verified.",
            f"""After the last update every one in the rollout engine equalled the reference
            quantization of the trainer's, bit for bit
            ({"; ".join(s["title"] for s in proven)}).""",
        )


def _plain_and_low(summaries: Sequence[Summary]) -> tuple[Summary | None, Summary | None]:
    """The first 16-bit run and the first 8-bit run that recorded a step."""
    done = [s for s in summaries if s["steps_done"]]
    plain = next((s for s in done if s["scheme"] == "bf16"), None)
    low = next((s for s in done if s["scheme"] not in (None, "bf16")), None)
    return plain, low


def _standard_error(run: Run) -> float:
    """Of the mean reward over the last quarter, taking steps as independent."""
    last = last_quarter(run.values("reward"))
    return statistics.stdev(last) / math.sqrt(len(last)) if len(last) > 1 else math.inf
