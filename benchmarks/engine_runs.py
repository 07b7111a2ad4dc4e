"""What benchmarks of engines share: a process for each mode, and how time and memory are taken."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

Measure = Callable[[str, str, argparse.Namespace, Path], dict[str, Any]]
"""(size, mode, arguments, empty folder) → figures of one mode."""


def make_parser(description: str, modes: Sequence[str]) -> argparse.ArgumentParser:
    """The options of every benchmark of an engine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", nargs="+", default=["7b"])
    parser.add_argument("--modes", nargs="+", default=list(modes), choices=modes)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory")
    parser.add_argument("--prediction", default="", help="written into the result before the run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("SIZE", "MODE"), help=argparse.SUPPRESS)
    return parser


def run_modes(args: argparse.Namespace, measure_mode: Measure) -> None:
    """Measure every size in every mode, each in a process of its own on an empty device."""
    if args.worker:
        with tempfile.TemporaryDirectory() as folder:  # engines look names and shapes up there
            found = measure_mode(*args.worker, args, Path(folder))
        size, mode = args.worker
        about = {"device": torch.cuda.get_device_name() if CUDA else "cpu"}
        about |= {"torch": torch.__version__, "copy_gb_per_s": round(copy_rate() / 1e9)}
        print("RESULT " + json.dumps({"size": size, "mode": mode, **about, **found}), flush=True)
        return
    result: dict[str, Any] = {
        "benchmark": Path(sys.argv[0]).stem,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "prediction": args.prediction,
        "runs": [],
    }
    for size in args.sizes:
        for mode in args.modes:
            result["runs"].append(_in_process(size, mode))
            if args.output:
                args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _in_process(size: str, mode: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--worker", size, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            print(line, file=sys.stderr, flush=True)
            return found
    return {"size": size, "mode": mode, "error": (done.stdout + done.stderr)[-3000:]}


def draw_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same in every mode."""
    draw = random.Random(0)  # noqa: S311
    return [[draw.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]


def measure_rate(generate: Callable[[int], object], num_sequences: int, length: int) -> int:
    """Generated tokens a second, median of three after a short warm-up.

    Args:
        generate: Makes every sequence a number of tokens long.
        num_sequences: How many.
        length: Tokens of each response.
    """
    generate(8)
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        generate(length)
        rates.append(num_sequences * length / (time.perf_counter() - begin))
    return round(statistics.median(rates))


def measure(action: Callable[[], object], repeat: int) -> dict[str, Any]:
    """Milliseconds (median after one warm-up), and this process's memory beyond what was there."""
    action()
    synchronize()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if CUDA else 0
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        action()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    return {
        "median_ms": round(statistics.median(times), 2),
        "all_ms": [round(t, 2) for t in times],
        "extra_mb": round((peak - before) / 1e6, 1),
    }


def synchronize() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def copy_rate() -> float:
    """Bytes a second of a large copy, read and write counted."""
    source = torch.empty(1 << (30 if CUDA else 24), dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(times[2:])


def update_limit_ms(weights: Sequence[tuple[str, torch.Tensor]]) -> float:
    """Milliseconds to read every weight in bfloat16 and write it in 8 bit, at the copy's rate."""
    return round(3 * sum(tensor.numel() for _, tensor in weights) / copy_rate() * 1e3, 2)


def verify_some(session: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> bool:
    """First and last decoder layers against the reference, bit for bit."""
    from flashrl.core.updates.verify import compare, compute_expected

    infos = session.engine.weights()
    layers = sorted({n.split(".")[2] for n in infos if ".layers." in n}, key=int)
    some = [
        (name, tensor)
        for name, tensor in weights
        if ".layers." in name and name.split(".")[2] in (layers[0], layers[-1])
    ]
    held = dict(session.engine.read_weights([name for name, _ in some]))
    return all(
        compare(name, held[name], expected, infos[name]).equal
        for name, expected in compute_expected(some, infos)
    )
