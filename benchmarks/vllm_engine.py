"""Rollout throughput and weight updates of vLLM: bf16, its own 8 bit, and FlashRL's.

    python benchmarks/vllm_engine.py --sizes 7b --modes bf16 ct_int8 flashrl_int8 \
        ct_fp8 flashrl_fp8_channel --output FILE

Each mode runs in a process of its own, one after another on the same device; compare the modes of
one run.  Weights are random in Qwen2.5's shapes.  For FlashRL's modes the update of all weights,
already on the device in bfloat16, is timed too, against vLLM's own layerwise reload in the mode
``ct_*``, and against the memory limit: 3 bytes a weight at the rate of a device copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MODES = ("bf16", "ct_int8", "ct_fp8", "flashrl_int8", "flashrl_fp8_channel", "flashrl_fp8_tensor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["7b"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--response-length", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--prediction", default="", help="written into the result before the run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("SIZE", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("RESULT " + json.dumps(run(*args.worker, args)), flush=True)
        return
    result: dict[str, Any] = {
        "benchmark": "vllm_engine",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "prediction": args.prediction,
        "runs": [],
    }
    for size in args.sizes:
        for mode in args.modes:
            result["runs"].append(in_process(size, mode))
            if args.output:
                args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def in_process(size: str, mode: str) -> dict[str, Any]:
    """One mode in a process of its own, so that each starts from an empty device."""
    command = [sys.executable, *sys.argv, "--worker", size, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            print(line, file=sys.stderr, flush=True)
            return found
    return {"size": size, "mode": mode, "error": (done.stdout + done.stderr)[-3000:]}


def run(size: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The engine looks names and shapes up in the folder when a session attaches.
    with tempfile.TemporaryDirectory() as folder:
        return measure_engine(size, mode, args, Path(folder))


def measure_engine(size: str, mode: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    import vllm
    from qwen_shapes import random_weights, write_config

    import flashrl

    quantized = {"ct_int8": "int", "ct_fp8": "float"}.get(mode)
    scheme = mode.removeprefix("flashrl_") if mode.startswith("flashrl_") else None
    extra = dict(flashrl.launch_args("vllm", scheme)) if scheme else {}
    begin = time.perf_counter()
    llm = vllm.LLM(
        model=str(write_config(folder, size, quantized=quantized)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=args.prompt_length + args.response_length,
        max_num_seqs=args.sequences,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        seed=0,
        **{"logprobs_mode": "processed_logprobs", **extra},
    )
    found: dict[str, Any] = {
        "size": size,
        "mode": mode,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "start_s": round(time.perf_counter() - begin, 1),
        "copy_gb_per_s": round(copy_rate() / 1e9),
    }
    for name, log_probs in (("tokens_per_s", None), ("tokens_per_s_with_log_probs", 0)):
        found[name] = round(throughput(llm, args, log_probs))
    weights = list(random_weights(size, device="cuda" if torch.cuda.is_available() else "cpu"))
    num_weights = sum(tensor.numel() for _, tensor in weights)
    found["update_limit_ms"] = round(3 * num_weights / copy_rate() * 1e3, 2)
    if scheme:
        found |= time_flashrl_updates(llm, scheme, weights, args.repeat)
    elif quantized:
        found |= time_layerwise_reload(llm, mode, weights, args.repeat)
    return found


def throughput(llm: Any, args: argparse.Namespace, log_probs: int | None) -> float:
    """Generated tokens a second, median of three after a short warm-up."""
    from vllm import SamplingParams

    draw = random.Random(0)  # noqa: S311
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(args.prompt_length)]}
        for _ in range(args.sequences)
    ]

    def generate(num_tokens: int) -> float:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=log_probs,
        )
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return args.sequences * num_tokens / (time.perf_counter() - begin)

    generate(8)
    return statistics.median(generate(args.response_length) for _ in range(3))


def time_flashrl_updates(llm: Any, scheme: str, weights: Any, repeat: int) -> dict[str, Any]:
    import torch

    import flashrl

    runner = find_runner(llm)
    addresses = {name: p.data_ptr() for name, p in runner.model.named_parameters()}
    session = flashrl.attach(llm, scheme)
    found: dict[str, Any] = {}
    for name, push in (
        ("load_weights", lambda: runner.model.load_weights(iter(weights))),
        ("session", lambda: session.update_weights(weights)),
    ):
        found[f"update_{name}"] = measure(push, repeat)
    found["addresses_kept"] = addresses == {
        name: p.data_ptr() for name, p in runner.model.named_parameters()
    }
    found["verified"] = verify_some(session, weights)
    torch.cuda.empty_cache()
    return found


def verify_some(session: Any, weights: Any) -> bool:
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


def time_layerwise_reload(llm: Any, mode: str, weights: Any, repeat: int) -> dict[str, Any]:
    """VLLM's own: quantize with its kernels, reload layer by layer."""
    from vllm import _custom_ops as ops

    def quantized() -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if not name.endswith("proj.weight"):
                yield name, tensor
                continue
            if mode == "ct_int8":
                values, scale, _ = ops.scaled_int8_quant(tensor)
            else:
                values, scale = ops.scaled_fp8_quant(tensor, use_per_token_if_dynamic=True)
            yield name, values
            yield name + "_scale", scale

    runner = find_runner(llm)
    return {
        "update_layerwise_reload": measure(
            lambda: runner.reload_weights(weights_iterator=quantized()), repeat
        )
    }


def find_runner(llm: Any) -> Any:
    core = llm.llm_engine.engine_core
    executor = getattr(core, "engine_core", core).model_executor
    return executor.driver_worker.worker.model_runner


def measure(action: Callable[[], Any], repeat: int) -> dict[str, Any]:
    """Milliseconds (median after one warm-up), and device memory beyond what was there."""
    import torch

    cuda = torch.cuda.is_available()

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    action()
    synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        action()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {
        "median_ms": round(statistics.median(times), 2),
        "all_ms": [round(t, 2) for t in times],
        "extra_mb": round((peak - before) / 1e6, 1),
    }


def copy_rate() -> float:
    """Bytes a second of a large copy, read and write counted."""
    import torch

    if not torch.cuda.is_available():
        source = torch.empty(1 << 24, dtype=torch.bfloat16)
    else:
        source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        if source.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * source.numel() * source.element_size() / statistics.median(times[2:])


if __name__ == "__main__":
    main()
