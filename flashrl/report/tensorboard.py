"""Training runs that a trainer logged for TensorBoard, under the names of this report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from flashrl.errors import MissingDependencyError
from flashrl.report.records import Run

__all__ = ["TensorBoardReader"]

_PATTERN = "*tfevents*"
_GROUP = "train/"  # TRL and OpenRLHF put every metric of training in it
_SCHEME = "flashrl/scheme/"

# This report's name → trainers' names for it, and what their number is multiplied by.
_NAMES: Mapping[str, tuple[tuple[str, float], ...]] = MappingProxyType(
    {
        # TRL and OpenRLHF; verl
        "reward": (("critic/score/mean", 1.0), ("critic/rewards/mean", 1.0)),
        # verl; OpenRLHF; TRL
        "seconds": (("timing_s/step", 1.0), ("timing/step_total", 1.0), ("step_time", 1.0)),
        "flashrl/generate_ms": (("timing_s/gen", 1000.0), ("timing/generation", 1000.0)),
        "flashrl/score_ms": (("timing_s/old_log_prob", 1000.0),),
        "flashrl/update_ms": (("timing_s/update_weights", 1000.0), ("timing/broadcast", 1000.0)),
    }
)


@attrs.frozen
class TensorBoardReader:
    """Reads the scalars of event files, one run for each folder that holds some."""

    def read(self, folder: Path) -> Iterator[Run]:
        """The runs below a folder, in the order of their paths.

        Raises:
            MissingDependencyError: There are event files, and TensorBoard is not installed.
        """
        files = sorted(path for path in folder.rglob(_PATTERN) if path.is_file())
        for parent in dict.fromkeys(path.parent for path in files):
            steps = _read_steps(path for path in files if path.parent == parent)
            if steps:
                name = parent.relative_to(folder).as_posix()
                yield _to_run(folder.resolve().name if name == "." else name, steps)


def _to_run(name: str, steps: Mapping[int, Mapping[str, float]]) -> Run:
    shares = {
        tag.removeprefix(_SCHEME): value
        for metrics in steps.values()
        for tag, value in metrics.items()
        if tag.startswith(_SCHEME)
    }
    scheme = next(iter(shares), None) if len(shares) == 1 else None
    return Run(
        name=name.replace("/", "-"),
        facts={"title": name} | ({"scheme": scheme} if scheme else {}),
        steps=[{**_translate(steps[step]), "step": step} for step in sorted(steps)],
        end={"status": "logged"},  # whether it ran to its end, event files do not say
    )


def _translate(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics, with this report's names beside the trainer's."""
    found = dict(metrics)
    for ours, theirs in _NAMES.items():
        for name, factor in theirs:
            if name in metrics:
                found.setdefault(ours, metrics[name] * factor)
    return found


def _read_steps(files: Iterable[Path]) -> dict[int, dict[str, float]]:
    """Step → metric → value; the latest event of a step and metric counts, as in a run resumed."""
    steps: dict[int, dict[str, float]] = {}
    events = [event for path in files for event in _events(path)]
    for event in sorted(events, key=attrgetter("wall_time")):
        for value in event.summary.value:
            number = _number(value)
            if number is not None:
                tag = value.tag.removeprefix(_GROUP)
                steps.setdefault(event.step, {})[tag] = number
    return steps


def _events(path: Path) -> Iterator[Any]:
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is TensorBoard's, which is not installed; pip install 'flashrl[report]'"
        ) from error
    yield from LegacyEventFileLoader(str(path)).Load()  # up to where a run was killed


def _number(value: Any) -> float | None:
    """A scalar, in either of the two ways that TensorBoard stores one."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
        from tensorboard.util.tensor_util import make_ndarray

        array = make_ndarray(value.tensor)
        return float(array) if array.dtype.kind in "fiu" else None
    return None
