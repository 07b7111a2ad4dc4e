"""A training run on disk: a JSON object a line, written as it happens, read back for the report.

The first line says what was run, one line a step holds the trainer's own log, another its sampled
tokens, the last how it ended.  A run that was cut off lacks the end, and reads all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import attrs

from flashrl.errors import ConfigError

__all__ = ["RUN_PATTERN", "JsonLinesReader", "Run", "RunWriter"]

RUN_PATTERN = "run-*.jsonl"
_COMPLETE = "complete"


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
        end: ``status`` (``"complete"``, ``"interrupted"``, ``"failed"``), ``seconds``,
            ``cpu_seconds``, ``peak_rss_bytes`` and the like; empty for a run that was cut off.
    """

    name: str
    facts: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[tuple[float, float]] = ()
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
        facts: See :class:`Run`.
    """

    def __init__(self, folder: Path, name: str, *, order: int = 0, **facts: Any) -> None:
        self.end: dict[str, Any] = {}
        self._file: IO[str] = (folder / f"run-{name}.jsonl").open("w", encoding="utf-8")
        self._write("run", name=name, order=order, **facts)

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
        """Every ``run-*.jsonl``, in the order of the runs."""
        runs = [_parse(path) for path in sorted(folder.glob(RUN_PATTERN))]
        yield from sorted(runs, key=lambda run: int(run.facts.get("order", 0)))


def _parse(path: Path) -> Run:
    facts: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    tokens: list[tuple[float, float]] = []
    end: dict[str, Any] = {}
    for entry in _entries(path):
        kind = entry.pop("kind", None)
        if kind == "run":
            facts = entry
        elif kind == "step":
            steps.append(entry)
        elif kind == "tokens":
            tokens += zip(entry["log_probs"], entry["rollout_log_probs"], strict=True)
        elif kind == "end":
            end = entry
    name = str(facts.pop("name", path.stem.removeprefix("run-")))
    return Run(name=name, facts=facts, steps=steps, tokens=tokens, end=end)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
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
