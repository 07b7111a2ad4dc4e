"""Decoding long contexts with vLLM: 16-bit and FP8 KV caches, as many sequences as fit in each.

    python benchmarks/long_context.py --sizes 32b --contexts 1024 8192 16384 \
        --modes bf16 flashrl_int8 flashrl_int8_kv --memory 0.92 --output FILE

The memory limit of a step reads every weight and every cached key and value once, at the rate of a
device copy.  ``*_kv`` modes keep the cache in FP8, with scales from the weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import vllm_engine
from engine_runs import copy_rate, draw_prompts, make_parser, run_modes
from qwen_shapes import SHAPES, random_weights

MODES = ("bf16", "flashrl_int8", "flashrl_int8_kv", "flashrl_fp8_channel_kv", "ct_int8_kv")
_SHORT, _LONG = 32, 288  # decoding is what the longer generation takes more


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], MODES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 16384])
    parser.add_argument("--most-sequences", type=int, default=512)
    run_modes(parser.parse_args(), measure_mode)


def measure_mode(size: str, mode: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    cache = {"kv_cache_dtype": "fp8"} if mode.endswith("_kv") else {}
    llm = vllm_engine.start(
        size,
        mode.removesuffix("_kv"),
        folder,
        max_model_len=max(args.contexts) + _LONG,
        max_num_seqs=args.most_sequences,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=True,
        **cache,
    )
    config = llm.llm_engine.vllm_config
    room = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    vocabulary = config.model_config.get_vocab_size()
    found: dict[str, Any] = {"cached_tokens": room, "contexts": []}
    for context in args.contexts:
        count = min(args.most_sequences, room // (context + _LONG))
        prompts = draw_prompts(count, context, vocabulary)
        times = []
        for length in (2, _SHORT, _LONG):  # the first fills the prefix cache
            begin = time.perf_counter()
            vllm_engine.generate(llm, prompts, length)
            times.append(time.perf_counter() - begin)
        steps = _LONG - _SHORT
        step = (times[2] - times[1]) / steps
        limit = step_bytes(size, mode, count * (context + (_SHORT + _LONG) // 2)) / copy_rate()
        found["contexts"].append(
            {
                "context": context,
                "sequences": count,
                "ms_a_step": round(step * 1e3, 2),
                "limit_ms": round(limit * 1e3, 2),
                "tokens_per_s": round(count / step),
            }
        )
    return found


def step_bytes(size: str, mode: str, cached_tokens: int) -> int:
    """Bytes that a decoding step reads: the layers' weights, lm_head, and the cache."""
    shape = SHAPES[size]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    row = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    small = 2 if mode == "bf16" else 1
    weights = sum(
        tensor.numel() * (small if name.endswith("proj.weight") else 2)
        for name, tensor in random_weights(size, device="meta")
        if "embed_tokens" not in name
    )
    return weights + cached_tokens * row * (1 if mode.endswith("_kv") else 2)


if __name__ == "__main__":
    main()
