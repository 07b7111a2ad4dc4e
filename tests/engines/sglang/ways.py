"""How scripts call SGLang: its arguments on a CPU, and every way in for weights that it has."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200]]
ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "bfloat16",
    "disable_cuda_graph": True,
    "max_total_tokens": 8192,
    "max_running_requests": 64,
    "mem_fraction_static": 0.05,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "random_seed": 0,
    "log_level": "error",
    "sleep_on_idle": True,  # else an idle scheduler takes a whole core
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8}


def generate(engine: Any, **params: Any) -> list[list[int]]:
    """SGLang's own call, as a user's script has it."""
    answers = engine.generate(input_ids=PROMPTS, sampling_params={**GREEDY, **params})
    return [answer["output_ids"] for answer in answers]


def settle(engine: Any) -> None:
    """Wait until the engine counts every request as finished, which it does after it answers."""
    while not engine.flush_cache().success:
        time.sleep(0.02)


def load_from_disk(engine: Any, folder: Path) -> tuple[bool, str]:
    """SGLang's own call, which fails while a request is not counted as finished."""
    settle(engine)
    success, message, *_ = engine.update_weights_from_disk(str(folder))
    return success, message


@contextmanager
def sglang_session(engine: Any) -> Iterator[None]:
    """What newer versions want around pushes."""
    settle(engine)
    if not hasattr(engine, "begin_weight_update"):
        yield
        return
    engine.begin_weight_update()
    yield
    success, message = engine.end_weight_update()
    assert success, message


def push(engine: Any, pairs: Any, **how: Any) -> tuple[bool, str]:
    """SGLang's own call, inside its session where there is one."""
    with sglang_session(engine):
        success, message = engine.update_weights_from_tensor(pairs, **how)
    return success, message


def bucket(pairs: list[tuple[str, Tensor]]) -> list[Any]:
    """A flattened bucket, as verl and slime send it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=pairs)
    payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return [MultiprocessingSerializer.serialize(payload, output_str=True)]


def fused(pairs: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """A checkpoint's tensors as the engine's own parameters, its vocabulary padded to 64."""
    tensors = dict(pairs)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = F.pad(tensors[name], (0, 0, 0, -len(tensors[name]) % 64))
    for whole, shards in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        first = f".{shards[0]}_proj."
        for name in [n for n in tensors if first in n]:
            parts = [tensors.pop(name.replace(first, f".{shard}_proj.")) for shard in shards]
            tensors[name.replace(first, f".{whole}.")] = torch.cat(parts)
    return list(tensors.items())


@contextmanager
def broadcast_group(
    engine: Any,
) -> Iterator[Callable[[list[tuple[str, Tensor]]], tuple[bool, str]]]:
    """A trainer's rank 0, which broadcasts to the engine; gives the function that sends."""
    from sglang.srt.utils import init_custom_process_group

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as trainer:
        group = trainer.submit(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name="trainer",
        )
        success, message = engine.init_weights_update_group(
            "127.0.0.1", port, 1, 2, "trainer", backend="gloo"
        )
        assert success, message

        def broadcast(tensors: list[Tensor]) -> None:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, src=0, group=group.result())

        def send(pairs: list[tuple[str, Tensor]]) -> tuple[bool, str]:
            sent = trainer.submit(broadcast, [t.clone() for _, t in pairs])
            with sglang_session(engine):
                answer = engine.update_weights_from_distributed(
                    [n for n, _ in pairs],
                    [str(t.dtype).removeprefix("torch.") for _, t in pairs],
                    [list(t.shape) for _, t in pairs],
                    group_name="trainer",
                )
            sent.result(timeout=60)
            return answer

        yield send
        engine.destroy_weights_update_group("trainer")
