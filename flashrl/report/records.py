"""A training run on disk: a JSON object a line, written as it happens, read back for the report.

The first line says what was run, one line a step holds the trainer's own log, another its sampled
tokens or their histogram, the last how it ended.  A run that was cut off lacks the end, and reads
all the same; so does one that was compressed by gzip afterwards.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import attrs

from flashrl.errors import ConfigError

__all__ = ["RUN_PATTERN", "Histogram", "JsonLinesReader", "Run", "RunWriter", "read_run"]

RUN_PATTERN = "run-*.jsonl"
_COMPLETE = "complete"


@attrs.frozen(kw_only=True)
class Histogram:
    """How the importance ratios of a step's tokens were spread.

    Args:
        step: The step whose rollout it is.
        edges: Of the bins, in nats: log π - log μ; what lies outside counts in the outermost bins.
        counts: Tokens in each bin.
    """

    step: int
    edges: Sequence[float]
    counts: Sequence[int]


@attrs.frozen(kw_only=True)
class Run:
    """One training run, whatever file it came from.

    Args:
        name: Short and unique in its folder.
        facts: What was run: ``title``, ``scheme``, ``correction``, ``num_steps``, ``seed``,
            ``model`` and so on; none is needed.
        steps: The trainer's log of each step, metric → value, with ``step`` and the seconds of its
            parts (``seconds/<part>``).
        tokens: Some sampled tokens, as pairs (log π, log μ).
        histograms: Of the importance ratio, at some steps.
        end: ``status`` (``"complete"``, ``"interrupted"``, ``"failed"``), ``seconds``,
            ``cpu_seconds``, ``peak_rss_bytes`` and the like; empty for a run that was cut off.
    """

    name: str
    facts: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[tuple[float, float]] = ()
    histograms: Sequence[Histogram] = ()
    end: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def title(self) -> str:
        """What people call it."""
        return str(self.facts.get("title", self.name))

    @property
    def status(self) -> str:
        """``"complete"``, ``"interrupted"``, ``"failed"``, or ``"cut off"`` without an end.

        ``"logged"`` is a run from a log that does not say.
        """
        return str(self.end.get("status", "cut off"))

    @property
    def complete(self) -> bool:
        """Whether it ran to its last step."""
        return self.status == _COMPLETE

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric has a finite value, and the values."""
        points = [
            (int(step["step"]), float(step[metric]))
            for step in self.steps
            if isinstance(step.get(metric), int | float) and math.isfinite(step[metric])
        ]
        return [step for step, _ in points], [value for _, value in points]

    def values(self, metric: str) -> list[float]:
        """A metric's finite values, step by step."""
        return self.series(metric)[1]


class RunWriter:
    """Writes ``run-<name>.jsonl``, a line at a time, so that whatever was done is on disk.

    As a context manager it writes the end: complete, interrupted or failed.

    Args:
        folder: Where; it exists.
        name: The run's name.
        order: Where the run stands among those of its folder.
        resume_after: A step: what an earlier writer wrote up to it is kept, and the rest, which
            will be done anew, is dropped.  None starts over.
        facts: See :class:`Run`; those of the earlier writer stay.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        order: int = 0,
        resume_after: int | None = None,
        **facts: Any,
    ) -> None:
        self.end: dict[str, Any] = {}
        path = folder / f"run-{name}.jsonl"
        kept = [] if resume_after is None else _entries_up_to(path, resume_after)
        scratch = path.with_suffix(".partial")
        self._file: IO[str] = scratch.open("w", encoding="utf-8")
        for entry in kept or [{"kind": "run", "name": name, "order": order, **facts}]:
            self._write(**entry)
        scratch.replace(path)  # the open file moves with its name

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Write the log of one step."""
        self._write("step", **metrics)

    def tokens(self, log_probs: Sequence[float], rollout_log_probs: Sequence[float]) -> None:
        """Write some sampled tokens: log π and log μ, to 5 decimals."""
        self._write(
            "tokens",
            log_probs=[round(value, 5) for value in log_probs],
            rollout_log_probs=[round(value, 5) for value in rollout_log_probs],
        )

    def histogram(self, histogram: Histogram) -> None:
        """Write how the importance ratios of a step were spread."""
        self._write("histogram", **attrs.asdict(histogram))

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            status = _COMPLETE
        else:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.end["error"] = f"{type(error).__name__}: {error}"
        self._write("end", status=status, **self.end)
        self._file.close()


class JsonLinesReader:
    """Reads what :class:`RunWriter` wrote."""

    def read(self, folder: Path) -> Iterator[Run]:
        """Every ``run-*.jsonl``, or else its ``.gz``, in the order of the runs."""
        paths = {path.with_suffix(""): path for path in folder.glob(f"{RUN_PATTERN}.gz")}
        paths |= {path: path for path in folder.glob(RUN_PATTERN)}
        runs = [read_run(paths[key]) for key in sorted(paths)]
        yield from sorted(runs, key=lambda run: int(run.facts.get("order", 0)))


def read_run(path: Path) -> Run:
    """Read what was written of one run.

    Args:
        path: Its ``run-*.jsonl``, or that compressed by gzip.

    Raises:
        ConfigError: A line of it is damaged, the last excepted.
    """
    facts: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    tokens: list[tuple[float, float]] = []
    histograms: list[Histogram] = []
    end: dict[str, Any] = {}
    for entry in _entries(path):
        kind = entry.pop("kind", None)
        if kind == "run":
            facts = entry
        elif kind == "step":
            steps.append(entry)
        elif kind == "tokens":
            tokens += zip(entry["log_probs"], entry["rollout_log_probs"], strict=True)
        elif kind == "histogram":
            histograms.append(Histogram(**entry))
        elif kind == "end":
            end = entry
    name = str(facts.pop("name", path.name.removeprefix("run-").partition(".jsonl")[0]))
    return Run(name=name, facts=facts, steps=steps, tokens=tokens, histograms=histograms, end=end)


def _entries_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """What a file holds before the first entry of a later step, and before the end."""
    kept: list[dict[str, Any]] = []
    for entry in _entries(path) if path.is_file() else ():
        if entry.get("kind") == "end" or entry.get("step", step) > step:
            break
        kept.append(entry)
    return kept


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # a run that was killed while it wrote
                return
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}, line {number}: an object was expected, got {line[:60]!r}")
        yield entry
