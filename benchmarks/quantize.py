"""Throughput of the quantizer beside a plain copy, and vLLM's kernels where vLLM is installed.

    python benchmarks/quantize.py [--device cuda] [--shape 3584x18944] [--repeat 9] [--output FILE]

Row-wise and block-wise quantization must read 16 bit and write 8, so 3 bytes an element over the
time is its useful rate, and the copy's rate (bytes read plus bytes written) its ceiling.  A scale
for the whole tensor needs a second read: its ceiling is 3/5 of the copy's.  Ratios to the copy of
the same run carry over to other machines where the rates do not.

On CUDA the kernels are timed with events, ten launches a sample, after a fifth of a second of the
same work: a GPU that has idled clocks low at first.  On a CPU it is the reference that is timed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import record

from flashrl.core.quantize import kernels, quantize_into
from flashrl.core.schemes import QuantScheme, get_scheme

# gate_up and down of Qwen2.5-7B, gate_up of Qwen2.5-32B, down of Llama-3-70B.
SHAPES = {
    "cuda": [(37888, 3584), (3584, 18944), (55296, 5120), (8192, 28672)],
    "cpu": [(4096, 4096)],
}
SCHEMES = ("int8", "fp8_channel", "fp8_tensor", "fp8_block")
VLLM = {
    "int8": ("scaled_int8_quant", {}),
    "fp8_channel": ("scaled_fp8_quant", {"use_per_token_if_dynamic": True}),
    "fp8_tensor": ("scaled_fp8_quant", {}),
}
EXPERTS = (512, 768, 2048)
GOAL = 0.92
WARM_UP_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", action="append", type=parse_shape, help="ROWSxCOLUMNS")
    parser.add_argument("--repeat", type=int, default=9, help="samples, of which the median")
    parser.add_argument("--note", default="", help="a line to keep with the result")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    timer = Timer(device, args.repeat)
    shapes = args.shape or SHAPES[device.type]
    copy_rate = measure_copy(timer)
    result = {
        "note": args.note,
        "machine": torch.cuda.get_device_name() if timer.cuda else platform.machine(),
        "versions": versions(),
        "samples": args.repeat,
        "copy_gb_per_s": round(copy_rate, 1),
        "goal": f"int8 and fp8_channel at {GOAL} of the copy",
        "single": [row for shape in shapes for row in measure(shape, timer, copy_rate)],
    }
    if timer.cuda:
        result["many"] = measure_many(timer, copy_rate)
    record(result, output=args.output)


def parse_shape(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


class Timer:
    """Median seconds of a call, after a warm-up."""

    def __init__(self, device: torch.device, samples: int) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.samples = samples

    def __call__(self, call: Callable[[], Any], calls: int = 10) -> float:
        """The device's own time for a call on CUDA, else the clock's."""
        call()
        if not self.cuda:
            return statistics.median(self._on_cpu(call) for _ in range(self.samples))
        warm = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < warm:
            self._on_gpu(call, calls)
        return statistics.median(self._on_gpu(call, calls) for _ in range(self.samples))

    def wall(self, call: Callable[[], Any]) -> float:
        """From the call to the end of its work, the launching included."""
        call()
        return statistics.median(self._on_cpu(call) for _ in range(self.samples))

    def _on_gpu(self, call: Callable[[], Any], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # The queue fills meanwhile, so that launching costs nothing.
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls / 1000

    def _on_cpu(self, call: Callable[[], Any]) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure_copy(timer: Timer) -> float:
    """GB/s of a copy within the device's memory, read plus written."""
    size = 1 << (30 if timer.cuda else 26)
    source = torch.empty(size, dtype=torch.bfloat16, device=timer.device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer(lambda: target.copy_(source)) / 1e9


def measure(shape: tuple[int, int], timer: Timer, copy_rate: float) -> Iterator[dict[str, Any]]:
    """Rates of one shape: the copy's, then each scheme's."""
    weight = torch.randn(shape, device=timer.device, dtype=torch.bfloat16)

    def row(what: str, bytes_an_element: int, seconds: float) -> dict[str, Any]:
        rate = weight.numel() * bytes_an_element / seconds / 1e9
        return {
            "shape": shape,
            "what": what,
            "us": round(seconds * 1e6, 1),
            "gb_per_s": round(rate, 1),
            "of_copy": round(rate / copy_rate, 3),
        }

    yield row("copy_", 4, timer(functools.partial(torch.empty_like(weight).copy_, weight)))
    for name in SCHEMES:
        yield row(name, 3, timer(quantizer(weight, get_scheme(name))))
    for name, (function, options) in VLLM.items() if timer.cuda else ():
        try:
            peer = getattr(importlib.import_module("vllm._custom_ops"), function)
        except ImportError:
            return
        yield row(f"vllm {name}", 3, timer(functools.partial(peer, weight, **options)))


def quantizer(weight: torch.Tensor, scheme: QuantScheme) -> Callable[[], None]:
    """What quantizes the weight into storage that exists, checked against the reference once."""
    out, scale, flag = storage(weight, scheme)
    if not weight.is_cuda:
        return lambda: quantize_into(weight, out, scale, scheme=scheme)
    kernels.quantize(weight, out, scale, scheme=scheme, flag=flag)
    rows = torch.arange(128, device=weight.device)
    if scheme.strategy == "tensor":  # With the largest value in it, a part has the whole's scale.
        rows[0] = weight.abs().amax(dim=1).argmax()
    part = weight[rows].cpu()
    want, want_scale, _ = storage(part, scheme)
    quantize_into(part, want, want_scale, scheme=scheme)
    assert torch.equal(out.view(torch.uint8)[rows].cpu(), want.view(torch.uint8))
    assert torch.equal(scale[: len(want_scale)].cpu(), want_scale)
    assert flag.item() == 0
    return lambda: kernels.quantize(weight, out, scale, scheme=scheme, flag=flag)


def storage(
    weight: torch.Tensor, scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An 8-bit destination, its scale, and a flag."""
    return (
        torch.empty(weight.shape, dtype=scheme.dtype, device=weight.device),
        torch.empty(scheme.scale_shape(weight.shape), device=weight.device),
        torch.zeros(1, dtype=torch.int32, device=weight.device),
    )


def measure_many(timer: Timer, copy_rate: float) -> dict[str, Any]:
    """Milliseconds for the experts of a mixture, one launch each and one for all."""
    count, rows, columns = EXPERTS
    scheme = get_scheme("int8")
    weights = torch.randn(EXPERTS, device=timer.device, dtype=torch.bfloat16)
    triples = [(weight, *storage(weight, scheme)[:2]) for weight in weights]

    def one_by_one() -> None:
        for triple in triples:
            kernels.quantize(*triple, scheme=scheme)

    graph = torch.cuda.CUDAGraph()
    one_by_one()
    with torch.cuda.graph(graph):
        one_by_one()
    return {
        "weights": [count, rows, columns],
        "scheme": "int8",
        "one_by_one_ms": round(timer.wall(one_by_one) * 1000, 2),
        "quantize_many_ms": round(
            timer.wall(lambda: kernels.quantize_many(triples, scheme=scheme)) * 1000, 2
        ),
        "graph_replay_ms": round(timer.wall(graph.replay) * 1000, 2),
        "limit_ms": round(count * rows * columns * 3 / copy_rate / 1e6, 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    main()
