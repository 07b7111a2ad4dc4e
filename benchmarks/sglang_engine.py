"""Rollout throughput and weight updates of SGLang: bf16, its own 8 bit, and FlashRL's.

    python benchmarks/sglang_engine.py --sizes 7b --modes bf16 own_int8 flashrl_int8 \
        own_fp8 flashrl_fp8_channel --output FILE

Each mode runs in a process of its own, one after another on the same device; compare the modes of
one run.  Weights are random in Qwen2.5's shapes.  An update goes from this process to SGLang's
scheduler, so its memory is not seen here; the limit is 3 bytes a weight at the rate of a copy.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from engine_runs import (
    CUDA,
    DEVICE,
    draw_prompts,
    make_parser,
    measure,
    measure_rate,
    run_modes,
    update_limit_ms,
    verify_some,
)
from qwen_shapes import SHAPES, random_weights, write_config

MODES = ("bf16", "own_int8", "own_fp8", "flashrl_int8", "flashrl_fp8_channel")
OWN = {"own_int8": "w8a8_int8", "own_fp8": "w8a8_fp8"}
ON_A_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
}
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
if not CUDA:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], MODES)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--response-length", type=int, default=256)
    parser.add_argument("--attention-backend", default="triton")
    run_modes(parser.parse_args(), measure_mode)


def measure_mode(size: str, mode: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import sglang

    import flashrl

    scheme = mode.removeprefix("flashrl_") if mode.startswith("flashrl_") else None
    extra = dict(flashrl.launch_args("sglang", scheme)) if scheme else {}
    if mode in OWN:
        extra["quantization"] = OWN[mode]
    begin = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(write_config(folder, size)),
        load_format="dummy",
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        dtype="bfloat16",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=args.memory,
        max_running_requests=args.sequences,
        context_length=args.prompt_length + args.response_length + 8,
        disable_radix_cache=True,
        log_level="error",
        random_seed=0,
        **{"attention_backend": args.attention_backend, **({} if CUDA else ON_A_CPU), **extra},
    )
    try:
        found: dict[str, Any] = {
            "sglang": sglang.__version__,
            "start_s": round(time.perf_counter() - begin, 1),
        }
        prompts = draw_prompts(args.sequences, args.prompt_length, SHAPES[size]["vocab_size"])
        for name, log_probs in (("tokens_per_s", False), ("tokens_per_s_with_log_probs", True)):
            found[name] = measure_rate(
                lambda length, log_probs=log_probs: generate(engine, prompts, length, log_probs),
                args.sequences,
                args.response_length,
            )
        weights = list(random_weights(size, device=DEVICE))
        found["update_limit_ms"] = update_limit_ms(weights)
        if scheme:
            session = flashrl.attach(engine, scheme)
            found["update_session"] = measure(lambda: session.update_weights(weights), args.repeat)
            found["verified"] = verify_some(session, weights)
        elif mode == "bf16":
            found["update_from_tensor"] = measure(lambda: push(engine, weights), args.repeat)
    finally:
        engine.shutdown()
    return found


def generate(engine: Any, prompts: list[list[int]], length: int, log_probs: bool) -> None:
    """Answer every prompt with so many tokens."""
    engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True},
        return_logprob=log_probs,
    )


def push(engine: Any, weights: list[tuple[str, Any]]) -> None:
    """SGLang's own update of a 16-bit engine."""
    from flashrl.engines.sglang.compat import weight_update

    with weight_update(engine):
        success, message = engine.update_weights_from_tensor(weights)
    if not success:
        raise RuntimeError(message)


if __name__ == "__main__":
    main()
