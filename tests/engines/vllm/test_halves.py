"""Weights that a sender quantized: values and scale apart, in any order and any bucket."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.quantize import quantize_into
from flashrl.core.schemes import get_scheme
from flashrl.errors import NonFiniteError, SchemeError, ShapeError, WeightUpdateError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .conftest import greedy, worker_of
from .w8a8 import is_linear

NAME = "model.layers.0.self_attn.k_proj.weight"


def quantized(model: Checkpoint, scheme_name: str) -> list[tuple[str, torch.Tensor]]:
    """What a sender that quantizes would push."""
    scheme = get_scheme(scheme_name)
    pushed = []
    for name, tensor in model.named_tensors():
        if not is_linear(name):
            pushed.append((name, tensor.clone()))
            continue
        values = torch.empty(tensor.shape, dtype=scheme.dtype)
        scale = torch.empty(scheme.scale_shape(tensor.shape))
        quantize_into(tensor, values, scale, scheme=scheme)
        pushed += [(name, values), (f"{name}_scale", scale)]
    return pushed


def open_session(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint], scheme: str
) -> tuple[Session, list[Checkpoint]]:
    models = [checkpoint("qwen2", seed) for seed in (0, 1)]
    llm = engine(models[0].path, **flashrl.launch_args("vllm", scheme))
    session = flashrl.attach(llm, scheme)
    session.update_weights(models[0].named_tensors())
    return session, models


def load(session: Session, weights: Any) -> Any:
    return worker_of(session.engine._engine).get_model().load_weights(weights)


@pytest.mark.parametrize("bucket", [1, 3, 1000])
@pytest.mark.parametrize("order", ["as it is", "backwards", "mixed"])
@pytest.mark.parametrize("scheme", ["int8", "fp8_channel", "fp8_tensor", "fp8_block"])
def test_they_equal_a_push_of_16_bit(
    engine: Callable[..., Any],
    checkpoint: Callable[..., Checkpoint],
    scheme: str,
    order: str,
    bucket: int,
) -> None:
    session, models = open_session(engine, checkpoint, scheme)
    session.update_weights(models[1].named_tensors())
    expected = greedy(session.engine._engine)
    for model in models:
        pushed = quantized(model, scheme)
        if order != "as it is":
            pushed.reverse()
        if order == "mixed":
            random.Random(0).shuffle(pushed)  # noqa: S311
        for start in range(0, len(pushed), bucket):
            sent = [(n, t.clone()) for n, t in pushed[start : start + bucket]]
            load(session, iter(sent))
            for _, tensor in sent:  # the sender's buffer is its own again
                tensor.view(torch.uint8).fill_(1)
        assert session.verify(model.named_tensors()).ok
    assert greedy(session.engine._engine) == expected


def test_a_reload_of_vllms_own_takes_them(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    """vLLM's own int8 layers answer NaN, or raise, when pushed in this way."""
    session, models = open_session(engine, checkpoint, "int8")
    for model in (models[1], models[0], models[1]):
        worker_of(session.engine._engine).model_runner.reload_weights(
            weights_iterator=iter(quantized(model, "int8"))
        )
        assert session.verify(model.named_tensors()).ok


@pytest.mark.parametrize(
    ("spoil", "error", "word"),
    [
        (lambda v, s: (v[:-1], s), ShapeError, "has shape"),
        (lambda v, s: (v, s[:-1]), ShapeError, "scale"),
        (lambda v, s: (v, s * torch.nan), NonFiniteError, "finite and positive"),
        (lambda v, s: (v, s * 0), NonFiniteError, "finite and positive"),
        (lambda v, s: (v.float().to(torch.float8_e4m3fn), s), SchemeError, "stores torch.int8"),
    ],
    ids=["values", "scale", "nan", "zero", "fp8"],
)
def test_what_does_not_fit_changes_nothing(
    engine: Callable[..., Any],
    checkpoint: Callable[..., Checkpoint],
    spoil: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    error: type[Exception],
    word: str,
) -> None:
    session, models = open_session(engine, checkpoint, "int8")
    good = dict(quantized(models[1], "int8"))
    values, scale = spoil(good[NAME], good[f"{NAME}_scale"])
    with pytest.raises(error, match=word):
        load(session, iter([(NAME, values), (f"{NAME}_scale", scale)]))
    assert session.verify(models[0].named_tensors()).ok


def test_a_weight_that_is_kept_in_16_bit_is_not_taken_in_8(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    session, _ = open_session(engine, checkpoint, "int8")
    for name in ("lm_head.weight", "model.mystery.weight_scale"):
        with pytest.raises(WeightUpdateError, match=r"no weight .* in 8 bit"):
            load(session, iter([(name, torch.zeros(4, 4, dtype=torch.int8))]))
