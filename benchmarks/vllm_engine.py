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
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_runs import (
    DEVICE,
    draw_prompts,
    make_parser,
    measure,
    measure_rate,
    run_modes,
    update_limit_ms,
    verify_some,
)
from qwen_shapes import random_weights, write_config

MODES = ("bf16", "ct_int8", "ct_fp8", "flashrl_int8", "flashrl_fp8_channel", "flashrl_fp8_tensor")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], MODES)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--response-length", type=int, default=256)
    run_modes(parser.parse_args(), measure_mode)


def measure_mode(size: str, mode: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import vllm

    begin = time.perf_counter()
    llm = start(
        size,
        mode,
        folder,
        max_model_len=args.prompt_length + args.response_length,
        max_num_seqs=args.sequences,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
    )
    found: dict[str, Any] = {
        "vllm": vllm.__version__,
        "start_s": round(time.perf_counter() - begin, 1),
    }
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = draw_prompts(args.sequences, args.prompt_length, vocabulary)
    for name, log_probs in (("tokens_per_s", None), ("tokens_per_s_with_log_probs", 0)):
        found[name] = measure_rate(
            lambda length, log_probs=log_probs: generate(llm, prompts, length, log_probs),
            args.sequences,
            args.response_length,
        )
    weights = list(random_weights(size, device=DEVICE))
    found["update_limit_ms"] = update_limit_ms(weights)
    if mode.startswith("flashrl_"):
        found |= time_flashrl_updates(llm, mode.removeprefix("flashrl_"), weights, args.repeat)
    elif mode.startswith("ct_"):
        found |= time_layerwise_reload(llm, mode, weights, args.repeat)
    return found


def start(size: str, mode: str, folder: Path, **arguments: Any) -> Any:
    """An engine with random weights: bf16, vLLM's own 8 bit, or FlashRL's."""
    import vllm

    import flashrl

    quantized = {"ct_int8": "int", "ct_fp8": "float"}.get(mode)
    extra: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    if mode.startswith("flashrl_"):
        extra |= flashrl.launch_args("vllm", mode.removeprefix("flashrl_"))
    return vllm.LLM(
        model=str(write_config(folder, size, quantized=quantized)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        **{**arguments, **extra},
    )


def generate(llm: Any, prompts: list[list[int]], length: int, log_probs: int | None = None) -> None:
    """Answer every prompt with so many tokens."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=log_probs
    )
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def time_flashrl_updates(llm: Any, scheme: str, weights: Any, repeat: int) -> dict[str, Any]:
    import flashrl

    runner = find_runner(llm)
    addresses = {name: p.data_ptr() for name, p in runner.model.named_parameters()}
    session = flashrl.attach(llm, scheme)
    found: dict[str, Any] = {}
    for name, push in (
        ("load_weights", lambda: runner.model.load_weights(weights)),
        ("load_weights_one_by_one", lambda: runner.model.load_weights(iter(weights))),
        ("session", lambda: session.update_weights(weights)),
    ):
        found[f"update_{name}"] = measure(push, repeat)
    found["addresses_kept"] = addresses == {
        name: p.data_ptr() for name, p in runner.model.named_parameters()
    }
    found["verified"] = verify_some(session, weights)
    return found


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


if __name__ == "__main__":
    main()
