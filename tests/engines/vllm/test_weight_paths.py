"""Every way in which weights reach a vLLM engine: five pushes that alternate between two models.

After each one all layers equal the reference bit for bit, nothing has moved, and greedy output
equals a fresh engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.interfaces import NamedTensors
from flashrl.testing import Checkpoint

from .conftest import greedy, note_path, worker_of

Push = Callable[[Any, Checkpoint], None]
PATHS: dict[str, Push] = {}


def path(push: Push) -> Push:
    PATHS[push.__name__] = push
    return push


def pairs(checkpoint: Checkpoint) -> list[tuple[str, torch.Tensor]]:
    return list(checkpoint.named_tensors())


def through_one_buffer(checkpoint: Checkpoint) -> NamedTensors:
    """verl#7327, #6454: the sender overwrites its buffer when the next tensor is asked for."""
    buffer = torch.empty(max(t.numel() for _, t in pairs(checkpoint)), dtype=torch.bfloat16)
    for name, tensor in pairs(checkpoint):
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(-77.0)


def model_of(engine: Any) -> Any:
    return worker_of(engine).get_model()


@path
def session(engine: Any, checkpoint: Checkpoint) -> None:
    flashrl.attach(engine, "int8").update_weights(checkpoint.named_tensors())


@path
def one_tensor_at_a_time(engine: Any, checkpoint: Checkpoint) -> None:
    """Flash-RL#33, #24: what took 40 minutes and then ran out of memory."""
    for pair in pairs(checkpoint):
        model_of(engine).load_weights(iter([pair]))


@path
def buckets_of_three(engine: Any, checkpoint: Checkpoint) -> None:
    """SkyRL#1680, verl#7136, #7978."""
    everything = pairs(checkpoint)
    for start in range(0, len(everything), 3):
        model_of(engine).load_weights(iter(everything[start : start + 3]))


@path
def load_weights_from_one_buffer(engine: Any, checkpoint: Checkpoint) -> None:
    model_of(engine).load_weights(through_one_buffer(checkpoint))


@path
def reload_weights(engine: Any, checkpoint: Checkpoint) -> None:
    runner = worker_of(engine).model_runner
    runner.reload_weights(weights_iterator=iter(pairs(checkpoint)))


@path
def reload_weights_in_reverse(engine: Any, checkpoint: Checkpoint) -> None:
    """Shards of a layer that come far apart."""
    runner = worker_of(engine).model_runner
    runner.reload_weights(weights_iterator=iter(pairs(checkpoint)[::-1]))


@path
def reload_weights_from_disk(engine: Any, checkpoint: Checkpoint) -> None:
    runner = worker_of(engine).model_runner
    before = runner.vllm_config.model_config.model
    runner.reload_weights(weights_path=str(checkpoint.path))
    runner.vllm_config.model_config.model = before


@path
def weight_transfer(engine: Any, checkpoint: Checkpoint) -> None:
    """VLLM's own protocol, over an engine that reads files."""
    from .file_transfer import send

    send(engine, checkpoint.path)


@pytest.fixture(params=["started", "attached"])
def int8_engine(
    request: pytest.FixtureRequest,
    engine: Callable[..., Any],
    checkpoint: Callable[..., Checkpoint],
) -> Any:
    from .file_transfer import transfer_arguments

    arguments = {"dtype": "float32", **transfer_arguments()}
    if request.param == "started":
        arguments.update(flashrl.launch_args("vllm", "int8"))
    found = engine(checkpoint(seed=0).path, **arguments)
    flashrl.attach(found, "int8")
    return found


@pytest.fixture(scope="module")
def answers(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> list[list[list[int]]]:
    """What fresh engines say."""
    arguments = flashrl.launch_args("vllm", "int8")
    return [greedy(engine(checkpoint(seed=seed).path, **arguments)) for seed in (0, 1)]


def addresses(engine: Any) -> dict[str, int]:
    """Every tensor that is reachable from the model (vllm#50521, #48438, #48539).

    Not what vLLM's own reload makes anew for each attention layer: host copies of KV scales and,
    before 0.29, the constants that it computes such scales with.  No matrix product reads them.
    """
    found = {}
    for name, module in model_of(engine).named_modules():
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor) and not key.endswith(("_scale_cpu", "_range")):
                found[f"{name}.{key}"] = value.data_ptr()
    return found


@pytest.mark.parametrize("name", PATHS)
def test_five_alternating_pushes(
    name: str,
    int8_engine: Any,
    checkpoint: Callable[..., Checkpoint],
    answers: list[list[list[int]]],
    request: pytest.FixtureRequest,
) -> None:
    kept = addresses(int8_engine)
    for step in range(1, 6):
        model = checkpoint(seed=step % 2)
        PATHS[name](int8_engine, model)
        report = flashrl.attach(int8_engine, "int8").verify(model.named_tensors())
        assert report.ok
        assert greedy(int8_engine) == answers[step % 2]
    assert addresses(int8_engine) == kept
    how = request.node.callspec.params["int8_engine"]
    note_path(how, name, "5 pushes", f"{len(report.comparisons)} tensors equal", "none moved")


def test_a_partial_reload_keeps_what_did_not_come(
    int8_engine: Any, checkpoint: Callable[..., Checkpoint]
) -> None:
    """vllm#45835, vllm#41670, vime#248: never uninitialised memory."""
    old, new = checkpoint(seed=0), checkpoint(seed=1)
    session = flashrl.attach(int8_engine, "int8")
    session.update_weights(old.named_tensors())
    came = "model.layers.0.self_attn.k_proj.weight"
    replaced = {**dict(old.named_tensors()), came: dict(new.named_tensors())[came]}
    worker_of(int8_engine).model_runner.reload_weights(
        weights_iterator=iter([(came, replaced[came])])
    )
    assert session.verify(replaced.items()).ok


def test_untouched_tensors_are_equal_after_an_update(
    int8_engine: Any, checkpoint: Callable[..., Checkpoint]
) -> None:
    """vllm#44371: buffers that no checkpoint brings, such as the rotary table."""
    buffers = {n: b.clone() for n, b in model_of(int8_engine).named_buffers()}
    assert buffers
    for seed in (1, 0):
        session_ = flashrl.attach(int8_engine, "int8")
        session_.update_weights(checkpoint(seed=seed).named_tensors())
    for name, buffer in model_of(int8_engine).named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_attributes_of_parameters_survive(
    int8_engine: Any, checkpoint: Callable[..., Checkpoint]
) -> None:
    """Flash-RL#33, #36, and Flash-RL#1 over three cycles."""
    weight = model_of(int8_engine).model.layers[0].self_attn.qkv_proj.weight
    weight.mystery = mystery = object()
    for step in range(3):
        reload_weights(int8_engine, checkpoint(seed=step % 2))
        one_tensor_at_a_time(int8_engine, checkpoint(seed=step % 2))
    after = model_of(int8_engine).model.layers[0].self_attn.qkv_proj.weight
    assert after is weight
    assert after.mystery is mystery
    assert callable(after.weight_loader)


def test_pushes_of_single_tensors_allocate_no_more_than_a_layer(
    int8_engine: Any, checkpoint: Callable[..., Checkpoint]
) -> None:
    """Flash-RL#33, #24: memory does not grow with the number of pushes."""
    everything = pairs(checkpoint(seed=1))
    model = model_of(int8_engine)
    largest = max(t.numel() for _, t in everything)

    def peak(count: int) -> int:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            for pair in everything[:count]:
                model.load_weights(iter([pair]))
        total = highest = 0
        for event in profile.events():
            if event.name == "[memory]":
                total += event.cpu_memory_usage
                highest = max(highest, total)
        return highest

    peak(1)
    assert peak(len(everything)) <= 4 * 4 * largest  # a few float32 copies of the largest


def iterate(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    yield from checkpoint.named_tensors()
