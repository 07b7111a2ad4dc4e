"""What ``import flashrl`` costs beyond the interpreter's own start.

    python benchmarks/import_time.py [--repeat 20] [--output FILE]

Each run is a fresh process; with and without the import alternate, and medians are compared.
The goal is under 50 ms.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from record import record

STATEMENTS = {"interpreter": "pass", "flashrl": "import flashrl", "torch": "import torch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(args.repeat + 1):
        for name, statement in STATEMENTS.items():
            times[name].append(start(statement))
    medians = {name: statistics.median(values[1:]) * 1000 for name, values in times.items()}
    result = {
        "python": platform.python_version(),
        "median_ms": {name: round(value, 1) for name, value in medians.items()},
        "import_flashrl_ms": round(medians["flashrl"] - medians["interpreter"], 1),
        "goal_ms": 50,
    }
    record(result, output=args.output)


def start(statement: str) -> float:
    """Seconds that a fresh interpreter takes to run a statement."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)  # noqa: S603
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
