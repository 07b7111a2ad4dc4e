"""Every way in for weights, on an engine that was started 8-bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import flashrl
from flashrl.core.updates.quantized import quantize_tensors
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .ways import GREEDY, PROMPTS, broadcast_group, bucket, fused, generate, load_from_disk, push

Checkpoints = tuple[Checkpoint, Checkpoint]
Push = Callable[[Checkpoint], None]


def succeed(answer: tuple[Any, ...]) -> None:
    success, message, *_ = answer
    assert success, message


@contextmanager
def way_in(way: str, session: Session, engine: Any) -> Iterator[Push]:
    """A function that brings all of a checkpoint's weights into an engine."""

    def pairs(checkpoint: Checkpoint) -> list[tuple[str, Tensor]]:
        return [(name, tensor.clone()) for name, tensor in checkpoint.named_tensors()]

    def by_bucket(checkpoint: Checkpoint) -> None:
        succeed(push(engine, bucket(pairs(checkpoint)), load_format="flattened_bucket"))

    def by_direct(checkpoint: Checkpoint) -> None:
        succeed(push(engine, fused(pairs(checkpoint)), load_format="direct"))

    def one_by_one(checkpoint: Checkpoint) -> None:
        for pair in pairs(checkpoint):
            succeed(push(engine, [pair]))

    if way == "broadcast":
        with broadcast_group(engine) as send:
            yield lambda checkpoint: succeed(send(pairs(checkpoint)))
        return
    yield {
        "session": lambda checkpoint: session.update_weights(checkpoint.named_tensors()),
        "named": lambda checkpoint: succeed(push(engine, pairs(checkpoint))),
        "flattened_bucket": by_bucket,
        "direct": by_direct,
        "one by one": one_by_one,
        "disk": lambda checkpoint: succeed(load_from_disk(engine, checkpoint.path)),
    }[way]


@pytest.mark.parametrize(
    "way", ["session", "named", "flattened_bucket", "direct", "one by one", "broadcast", "disk"]
)
def test_alternating_pushes_equal_the_reference_and_fresh_engines(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any, way: str
) -> None:
    with way_in(way, session, engine) as load:
        for step in range(5):
            which = (step + 1) % 2
            load(wide_checkpoints[which])
            assert session.verify(wide_checkpoints[which].named_tensors()).ok
            assert generate(engine) == fresh_answers[which]


def test_wrapped_names_reach_the_engine_through_its_own_push(
    session: Session, engine: Any, wide_checkpoints: Checkpoints
) -> None:
    pairs = [
        (f"module._orig_mod.{name}", tensor.clone())
        for name, tensor in wide_checkpoints[1].named_tensors()
    ]
    succeed(push(engine, pairs))
    assert session.verify(wide_checkpoints[1].named_tensors()).ok


def test_names_of_a_multimodal_trainer_reach_a_text_model(
    session: Session, engine: Any, wide_checkpoints: Checkpoints
) -> None:
    """SGLang's own loader leaves them out, and says nothing."""
    pairs = [
        (name.replace("model.", "model.language_model."), tensor.clone())
        for name, tensor in wide_checkpoints[1].named_tensors()
    ]
    succeed(push(engine, pairs))
    assert session.verify(wide_checkpoints[1].named_tensors()).ok


def test_cached_prefixes_do_not_outlive_an_update(
    session: Session, engine: Any, wide_checkpoints: Checkpoints
) -> None:
    """verl#5459."""
    generate(engine)
    session.update_weights(wide_checkpoints[1].named_tensors())
    answer = engine.generate(input_ids=[PROMPTS[1]], sampling_params=GREEDY)[0]
    assert answer["meta_info"]["cached_tokens"] == 0


def test_dtypes_agree(session: Session, wide_checkpoints: Checkpoints) -> None:
    """bf16 values pushed as fp32 are the same weights."""
    session.update_weights((n, t.float()) for n, t in wide_checkpoints[1].named_tensors())
    assert session.verify(wide_checkpoints[1].named_tensors()).ok


# Weights that the sender quantized.


@pytest.fixture
def quantized(wide_checkpoints: Checkpoints) -> list[tuple[str, Tensor]]:
    """B, quantized before it travels."""
    pairs = list(quantize_tensors(wide_checkpoints[1].named_tensors(), "int8"))
    assert {t.dtype for n, t in pairs if n.endswith("q_proj.weight")} == {torch.int8}
    return pairs


@pytest.mark.parametrize("order", ["as made", "reversed", "scales last", "one by one"])
def test_quantized_weights_equal_pushing_16_bit(
    session: Session,
    engine: Any,
    wide_checkpoints: Checkpoints,
    fresh_answers: Any,
    quantized: list[tuple[str, Tensor]],
    order: str,
) -> None:
    if order == "reversed":
        quantized.reverse()
    elif order == "scales last":
        quantized.sort(key=lambda pair: pair[0].endswith("_scale"))
    groups = [[pair] for pair in quantized] if order == "one by one" else [quantized]
    for group in groups:
        succeed(push(engine, group))
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
    assert generate(engine) == fresh_answers[1]


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_tensor", "fp8_block"])
def test_quantized_weights_of_every_scheme_equal_pushing_16_bit(
    pool: Any, wide_checkpoints: Checkpoints, scheme: str
) -> None:
    with (
        pool.borrow(wide_checkpoints[0].path, "qwen2") as engine,
        flashrl.attach(engine, scheme) as session,
    ):
        session.update_weights(wide_checkpoints[1].named_tensors())
        answer = generate(engine)
        session.update_weights(wide_checkpoints[0].named_tensors())
        pairs = list(quantize_tensors(wide_checkpoints[1].named_tensors(), scheme))
        succeed(push(engine, bucket(pairs), load_format="flattened_bucket"))
        assert session.verify(wide_checkpoints[1].named_tensors()).ok
        assert generate(engine) == answer


@pytest.mark.parametrize("half", ["weight", "weight_scale"])
def test_half_a_quantized_weight_is_waited_for(
    session: Session,
    engine: Any,
    wide_checkpoints: Checkpoints,
    fresh_answers: Any,
    quantized: list[tuple[str, Tensor]],
    half: str,
) -> None:
    """Flash-RL#30: a weight never meets another's scale, and an old one is never taken for new."""
    name = f"model.layers.1.mlp.up_proj.{half}"
    succeed(push(engine, [pair for pair in quantized if pair[0] != name]))
    with pytest.raises(ValueError, match=r"1 of 27 weights are missing.*up_proj.*came without"):
        generate(engine)
    succeed(push(engine, [pair for pair in quantized if pair[0] == name]))
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
    assert generate(engine) == fresh_answers[1]


def test_16_bit_takes_the_place_of_half_a_weight(
    session: Session,
    engine: Any,
    wide_checkpoints: Checkpoints,
    fresh_answers: Any,
    quantized: list[tuple[str, Tensor]],
) -> None:
    succeed(push(engine, [pair for pair in quantized if pair[0].endswith("up_proj.weight")]))
    session.update_weights(wide_checkpoints[0].named_tensors())
    assert session.verify(wide_checkpoints[0].named_tensors()).ok
    assert generate(engine) == fresh_answers[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another type", "int8 stores torch.int8"),
        ("shape", r"the engine's is \(128, 128\)"),
        ("scale's shape", "a float32 scale of shape"),
        ("negative scale", "not finite and positive"),
        ("no linear", "keeps this weight in 16 bit"),
    ],
)
def test_bad_halves_are_named_and_nothing_is_written(
    session: Session,
    engine: Any,
    fresh_answers: Any,
    quantized: list[tuple[str, Tensor]],
    fault: str,
    message: str,
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    values, scale = (dict(quantized)[key] for key in (name, f"{name}_scale"))
    bad = {
        "another type": (name, values.to(torch.float8_e4m3fn)),
        "shape": (name, values[:64]),
        "scale's shape": (f"{name}_scale", scale[:64]),
        "negative scale": (f"{name}_scale", -scale),
        "no linear": ("model.norm.weight", torch.ones(128, dtype=torch.int8)),
    }[fault]
    success, told = push(engine, [bad])
    assert not success
    assert bad[0] in told
    assert re.search(message, told)
    assert generate(engine) == fresh_answers[0]
