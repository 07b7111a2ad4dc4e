"""Time and peak memory of weights and metrics: this library, verl and TRL in one run.

    python benchmarks/correction.py --shape 64x1024 --shape 256x4096 --device cpu

Each call makes token-level truncated weights and the metrics that its library reports beside them.
TRL has no function for it: the statements of its ``GRPOTrainer`` that do it are taken from the
installed source and run on the same tensors.  A ratio above 1 is how often ours fits into theirs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import ctypes
import importlib.metadata
import inspect
import io
import platform
import statistics
import subprocess
import sys
import textwrap
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from record import record

from flashrl.core import correction

CAP = 2.0
Call = Callable[[], object]


def make_batch(batch: int, length: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(batch, length, generator=generator) - 0.5
    old = rollout + 0.1 * torch.randn(batch, length, generator=generator)
    lengths = torch.randint(length // 4, length + 1, (batch, 1), generator=generator)
    mask = (torch.arange(length) < lengths).float()
    return {"old": old.to(device), "rollout": rollout.to(device), "mask": mask.to(device)}


def ours(data: dict[str, torch.Tensor]) -> Call:
    return lambda: correction.compute(
        old_log_probs=data["old"],
        rollout_log_probs=data["rollout"],
        response_mask=data["mask"],
        config=correction.CorrectionConfig(high=CAP),
    )


def verl(data: dict[str, torch.Tensor]) -> Call:
    from verl.trainer.ppo import rollout_corr_helper as helper

    return lambda: helper.compute_rollout_correction_and_rejection_mask(
        data["old"],
        data["rollout"],
        data["mask"],
        rollout_is="token",
        rollout_is_threshold=CAP,
    )


def trl(data: dict[str, torch.Tensor]) -> Call:
    from trl.trainer import grpo_trainer

    method = grpo_trainer.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    guard = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == guard]
    blocks = [n for n in blocks if "vllm_importance_sampling_ratio" in ast.unparse(n)]
    blocks.sort(key=lambda node: node.lineno)
    code = compile(ast.Module(body=blocks, type_ignores=[]), "<GRPOTrainer>", "exec")
    trainer = types.SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=CAP,
        accelerator=types.SimpleNamespace(gather=lambda tensor: tensor),
        _metrics={"train": collections.defaultdict(list)},
    )
    names = {
        "self": trainer,
        "mode": "train",
        "device": data["mask"].device,
        "tool_mask": None,
        "completion_mask": data["mask"],
        "old_per_token_logps": data["old"],
        "sampling_per_token_logps": data["rollout"],
        "output": {},
    }
    return lambda: exec(code, vars(grpo_trainer) | names)  # noqa: S102


CONTENDERS = {"flashrl": ours, "verl": verl, "trl": trl}


def load(name: str, data: dict[str, torch.Tensor]) -> Call | None:
    """The contender's call, or None if it is not installed."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return CONTENDERS[name](data)
        except ModuleNotFoundError as error:
            print(f"{name} left out: {error}", file=sys.stderr)
            return None


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def time_calls(calls: dict[str, Call], device: str, repeats: int) -> dict[str, float]:
    """Median seconds of each call; the contenders take turns, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cuda_peak(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def resident_peak(call: Call) -> int:
    """How far one call raises this process's resident memory (Linux)."""

    def read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

    ctypes.CDLL(None).malloc_trim(0)  # give back what the allocator kept, or it hides the peak
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = read("VmRSS")
    call()
    return read("VmHWM") - before


def cpu_peak(name: str, shape: str) -> int | None:
    """Peak of one call in a fresh process, whose allocator holds no memory from earlier ones."""
    if platform.system() != "Linux":
        return None
    command = [sys.executable, __file__, "--peak-of", name, "--shape", shape]
    result = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return int(result.stdout)


def measure(shape: str, device: str, repeats: int) -> dict[str, object]:
    batch, length = map(int, shape.split("x"))
    data = make_batch(batch, length, device)
    calls = {name: call for name in CONTENDERS if (call := load(name, data)) is not None}
    seconds = time_calls(calls, device, repeats)
    peaks = {
        name: cuda_peak(call) if device.startswith("cuda") else cpu_peak(name, shape)
        for name, call in calls.items()
    }
    report: dict[str, object] = {"shape": [batch, length], "tokens": int(data["mask"].sum())}
    for name in calls:
        entry: dict[str, float | None] = {"seconds": seconds[name], "peak_bytes": peaks[name]}
        if name != "flashrl":
            entry["time_ratio"] = seconds[name] / seconds["flashrl"]
            mine, theirs = peaks["flashrl"], peaks[name]
            entry["memory_ratio"] = theirs / mine if mine and theirs is not None else None
        report[name] = entry
    return report


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="BATCHxLENGTH; may be given again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    parser.add_argument("--peak-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = options.shape or ["64x1024", "256x4096"]
    if options.peak_of:
        small, full = make_batch(2, 64, "cpu"), make_batch(*map(int, shapes[0].split("x")), "cpu")
        for data in (small, full):  # the first call pays for what is loaded only once
            call = load(options.peak_of, data)
            peak = resident_peak(call)
        print(peak)
        return
    report = {
        "device": options.device,
        "device_name": torch.cuda.get_device_name() if options.device != "cpu" else None,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "versions": {"torch": torch.__version__} | {name: version(name) for name in CONTENDERS},
        "results": [measure(shape, options.device, options.repeats) for shape in shapes],
    }
    record(report, output=options.output)


if __name__ == "__main__":
    main()
