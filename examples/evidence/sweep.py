#!/usr/bin/env python3
"""Do many runs, several at a time on one GPU, within a time budget; again, to go on.

    python examples/evidence/sweep.py --out evidence --minutes 28 --jobs 4

What is finished is skipped, what was stopped or broke is gone on with, and a run that fails is
noted in ``sweep.jsonl`` and stops no other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from plan import Arm, Condition, Plan, is_done, names, read_arm, read_condition
from run import INTERRUPTED

from flashrl.errors import FlashRLError

HERE = Path(__file__).parent
ALL_SEEDS = ("bf16", "int8", "int8_tis")
_ATTEMPTS = 2
_POLL_SECONDS = 0.2


@attrs.frozen(kw_only=True)
class Options:
    """How a sweep goes about its runs.

    Args:
        output: Folder for the records.
        jobs: Runs at a time.
        seconds: When to stop; what runs then saves a checkpoint.
        grace: Seconds that it has for that.
        extra: Further arguments of ``run.py``.
    """

    output: Path
    jobs: int
    seconds: float
    grace: float
    extra: Sequence[str] = ()


def plan_runs(
    arms: Sequence[Arm], conditions: Sequence[Condition], *, num_seeds: int, num_few_seeds: int
) -> Iterator[Plan]:
    """Every run, seed by seed, so that wherever it ends the comparisons are as paired as can be.

    Args:
        arms: Those of :data:`ALL_SEEDS` get every seed.
        conditions: Each is run in every arm.
        num_seeds: From 0 on.
        num_few_seeds: Of the other arms.
    """
    for seed in range(num_seeds):
        for condition in conditions:
            for arm in arms:
                if seed < num_few_seeds or arm.name in ALL_SEEDS:
                    yield Plan(arm=arm, condition=condition, seed=seed)


class Sweep:
    """Runs that wait and runs that run.

    Args:
        plans: Each with the two arguments that name its arm and its condition.
        options: How to go about them.
    """

    def __init__(self, plans: Sequence[tuple[Plan, list[str]]], options: Options) -> None:
        self._options = options
        self._waiting = deque(plans)
        self._running: list[tuple[Plan, list[str], subprocess.Popen[bytes], float]] = []
        self._attempts: Counter[str] = Counter()
        self._deadline = time.monotonic() + options.seconds
        self._stopping = False

    def stop(self, *_: Any) -> None:
        """Begin nothing more, and ask what runs to save and end."""
        self._stopping = True

    def run(self) -> None:
        """Until all is done, the time is up, or :meth:`stop` was called."""
        while self._waiting or self._running:
            if self._stopping or time.monotonic() > self._deadline:
                self._end_all()
                return
            while self._waiting and len(self._running) < self._options.jobs:
                self._start(*self._waiting.popleft())
            time.sleep(_POLL_SECONDS)
            self._collect()

    def _start(self, plan: Plan, named: list[str]) -> None:
        work = self._options.output / "work" / plan.name
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "run.py"), *named, "--seed", str(plan.seed)]
        command += ["--out", str(self._options.output), *self._options.extra]
        with (work / "log.txt").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - a script of ours
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._attempts[plan.name] += 1
        self._running.append((plan, named, process, time.monotonic()))
        self._note(plan, "started")

    def _collect(self) -> None:
        """See which have ended; one that failed is tried once more when all others have begun."""
        for entry in [entry for entry in self._running if entry[2].poll() is not None]:
            plan, named, process, started = entry
            self._running.remove(entry)
            code = process.returncode
            stopped = (INTERRUPTED, -signal.SIGTERM)  # the latter before training has begun
            event = "finished" if code == 0 else "interrupted" if code in stopped else "failed"
            self._note(plan, event, code=code, seconds=round(time.monotonic() - started, 1))
            if event == "failed" and self._attempts[plan.name] < _ATTEMPTS:
                self._waiting.append((plan, named))

    def _end_all(self) -> None:
        self._waiting.clear()
        for _, _, process, _ in self._running:
            process.terminate()
        until = time.monotonic() + self._options.grace
        while self._running and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self._collect()
        for _, _, process, _ in self._running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._collect()
        self._waiting.clear()

    def _note(self, plan: Plan, event: str, **details: Any) -> None:
        entry = {"time": round(time.time(), 1), "run": plan.name, "event": event, **details}
        with (self._options.output / "sweep.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{event:>11} {plan.name}", *(f"{k}={v}" for k, v in details.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--arms", nargs="+", default=names("arms"), help="[default: all]")
    parser.add_argument("--conditions", nargs="+", default=names("conditions"))
    parser.add_argument("--seeds", type=int, default=8, help=f"of {', '.join(ALL_SEEDS)}")
    parser.add_argument("--few-seeds", type=int, default=3, help="of the other arms [default: 3]")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time [default: 4]")
    parser.add_argument("--minutes", type=float, default=28.0, help="time budget [default: 28]")
    parser.add_argument(
        "--grace", type=float, default=60.0, help="seconds of it for saving [default: 60]"
    )
    arguments, extra = parser.parse_known_args()
    output = arguments.out
    output.mkdir(parents=True, exist_ok=True)
    try:
        arms = {name: read_arm(name) for name in arguments.arms}
        conditions = {name: read_condition(name) for name in arguments.conditions}
        plans = list(
            plan_runs(
                list(arms.values()),
                list(conditions.values()),
                num_seeds=arguments.seeds,
                num_few_seeds=arguments.few_seeds,
            )
        )
        left = [plan for plan in plans if not is_done(plan, output)]
    except FlashRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    given = {value.name: key for key, value in (arms | conditions).items()}
    options = Options(
        output=output,
        jobs=arguments.jobs,
        seconds=60 * arguments.minutes - arguments.grace,
        grace=arguments.grace,
        extra=extra,
    )
    sweep = Sweep(
        [(plan, [given[plan.arm.name], given[plan.condition.name]]) for plan in left], options
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, sweep.stop)
    print(f"{len(plans)} runs, of which {len(plans) - len(left)} are done", flush=True)
    sweep.run()
    done = sum(is_done(plan, output) for plan in plans)
    print(f"{done} of {len(plans)} runs are done; `flashrl report {output}` draws them")
    return 0 if done == len(plans) else 1


if __name__ == "__main__":
    sys.exit(main())
