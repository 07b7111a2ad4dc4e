"""What every benchmark writes: its figures, with the date and the command that made them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def record(figures: Mapping[str, Any], *, output: Path | None) -> None:
    """Print the figures as JSON, and write them to a file if there is one."""
    path = Path(sys.argv[0])
    stamped = {
        "benchmark": path.stem,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{path.name}", *sys.argv[1:]]),
        **figures,
    }
    text = json.dumps(stamped, indent=2) + "\n"
    print(text, end="")
    if output:
        output.write_text(text)
