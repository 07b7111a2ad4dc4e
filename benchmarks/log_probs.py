"""Time and peak memory of the log-probabilities, beside verl's and TRL's own functions.

    python benchmarks/log_probs.py [--device cuda] [--batch 4] [--length 256] [--vocab 50000]

All run in one process on the same tensors, so the ratios (ours / theirs, under 1 is better) carry
over where the seconds do not.  Prints JSON.  A peer that is not installed is left out and named.
Peak memory is what a call adds to its inputs: the allocator's on CUDA, resident memory on Linux.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from record import record

from flashrl.core.log_probs import compute_log_probs, compute_log_probs_from_hidden
from flashrl.core.log_probs.sampling import process_logits
from flashrl.core.rollouts import SamplingParams

Scorer = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def naive(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """What every textbook writes."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(-1, tokens[..., None]).squeeze(-1)


def ours(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    return compute_log_probs(
        logits, tokens, params=SamplingParams(temperature=temperature)
    ).log_probs


def peers() -> tuple[dict[str, Scorer], dict[str, str]]:
    """The functions to compare with, and why others are missing."""
    scorers: dict[str, Scorer] = {"naive": naive}
    missing = {}
    try:
        verl = importlib.import_module("verl.utils.torch_functional").logprobs_from_logits
        scorers["verl.logprobs_from_logits"] = lambda logits, tokens, t: verl(
            logits if t == 1.0 else logits / t, tokens
        )
    except ImportError as error:
        missing["verl"] = str(error)
    try:
        trl = importlib.import_module("trl.trainer.utils").selective_log_softmax
        scorers["trl.selective_log_softmax"] = lambda logits, tokens, t: trl(
            logits, tokens, temperature=t
        )
    except ImportError as error:
        missing["trl"] = str(error)
    return scorers, missing


def sorted_truncation(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Top-k and top-p by sorting the whole vocabulary, as engines without a fused kernel do."""
    ordered, index = logits.sort(dim=-1)
    kth = ordered[..., -params.top_k, None] if params.top_k else ordered[..., :1]
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
    removed[..., -1] = False
    return logits.scatter(-1, index, ordered.masked_fill(removed, -torch.inf))


def peak_bytes(device: torch.device, call: Callable[[], Any]) -> int | None:
    """How much memory a call needs beyond what exists before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None

    def resident(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    clear.write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)  # less is memory that was freed and not given back


def seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(
    device: torch.device, calls: dict[str, Callable[[], torch.Tensor]], repeats: int
) -> dict[str, Any]:
    """Measure the calls, the first of which is ours, and relate it to each of the others.

    They take turns, so that a busy machine is busy for all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            times[name].append(seconds(device, call))
    measured: dict[str, dict[str, Any]] = {
        name: {
            "seconds": statistics.median(times[name][1:]),  # the first warms up
            "peak_bytes": peak_bytes(device, call),
        }
        for name, call in calls.items()
    }
    first, *others = calls
    mine = measured[first]
    for name in others:
        theirs = measured[name]
        theirs["time_ratio"] = round(mine["seconds"] / theirs["seconds"], 3)
        if mine["peak_bytes"] and theirs["peak_bytes"]:
            theirs["memory_ratio"] = round(mine["peak_bytes"] / theirs["peak_bytes"], 3)
        theirs["max_difference"] = (calls[first]() - calls[name]()).abs().max().item()
    return measured


def cases(
    device: torch.device, batch: int, length: int, vocab: int
) -> Iterator[tuple[str, dict[str, Callable[[], torch.Tensor]]]]:
    """Every comparison, named."""
    scorers = {"flashrl": ours, **peers()[0]}
    generator = torch.Generator(device).manual_seed(0)
    hidden_size = 256

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    tokens = torch.randint(0, vocab, (batch, length), device=device, generator=generator)
    logits = randn(batch, length, vocab) * 4

    def backward(scorer: Scorer, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.detach().requires_grad_()
        scorer(logits, tokens, 1.0).sum().backward()
        return logits.grad

    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        name = str(dtype).removeprefix("torch.")
        for temperature in (1.0, 0.7):
            yield (
                f"logits {name}, T={temperature}",
                {
                    key: lambda scorer=scorer, given=given, t=temperature: scorer(given, tokens, t)
                    for key, scorer in scorers.items()
                },
            )
        yield (
            f"logits {name}, forward and backward",
            {
                key: lambda scorer=scorer, given=given: backward(scorer, given)
                for key, scorer in scorers.items()
            },
        )
    few = logits[0].clone()
    del logits, given
    for params in (SamplingParams(top_p=0.95), SamplingParams(top_k=50, top_p=0.95)):
        yield (
            f"distribution, top_k={params.top_k}, top_p={params.top_p}",
            {
                "flashrl": lambda few=few, params=params: process_logits(few, params).softmax(-1),
                "sorting the vocabulary": lambda few=few, params=params: sorted_truncation(
                    few, params
                ).softmax(-1),
            },
        )
    del few
    hidden, weight = randn(batch, length, hidden_size) / 8, randn(vocab, hidden_size)
    yield (
        "hidden states, float32",
        {
            "flashrl": lambda: compute_log_probs_from_hidden(hidden, weight, tokens).log_probs,
            **{
                key: lambda scorer=scorer: scorer(hidden @ weight.T, tokens, 1.0)
                for key, scorer in scorers.items()
                if key != "flashrl"
            },
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    report = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "batch": arguments.batch,
        "length": arguments.length,
        "vocab": arguments.vocab,
        "missing_peers": peers()[1],
        "cases": {
            name: compare(device, calls, arguments.repeats)
            for name, calls in cases(device, arguments.batch, arguments.length, arguments.vocab)
        },
    }
    record(report, output=arguments.output)


if __name__ == "__main__":
    main()
