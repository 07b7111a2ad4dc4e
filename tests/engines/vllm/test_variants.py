"""Engines in other ways: float32 logits, compiled models, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashrl
from flashrl.errors import UnsupportedError
from flashrl.testing import Checkpoint

from .conftest import greedy, worker_of


@pytest.mark.parametrize("architecture", ["qwen2", "llama_tied"])
@pytest.mark.parametrize("started", [True, False], ids=["started", "attached"])
def test_logits_in_float32_follow_updates(
    engine: Callable[..., Any],
    checkpoint: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    started: bool,
) -> None:
    """prime-rl#2438, for an lm_head of its own and one that is tied."""
    monkeypatch.setenv("FLASHRL_LMHEAD_FP32", "1")
    models = [checkpoint(architecture, seed) for seed in (0, 1)]
    arguments = flashrl.launch_args("vllm", "int8") if started else {}
    # max_num_seqs tells these engines from the ones without float32 logits.
    llm = engine(models[0].path, dtype="bfloat16", max_num_seqs=7, **arguments)
    session = flashrl.attach(llm, "int8")
    model = worker_of(llm).get_model()
    hidden = torch.randn(3, 256, dtype=torch.bfloat16)
    for seed in (1, 0, 1):
        session.update_weights(models[seed].named_tensors())
        weights = dict(models[seed].named_tensors())
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        logits = model.compute_logits(hidden)
        assert logits.dtype == torch.float32
        expected = hidden.double() @ head.double().t()
        assert torch.allclose(logits.double(), expected, atol=1e-4, rtol=1e-5)
    if not started:
        session.detach()


def test_a_compiled_model_takes_pushes_but_no_attach(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    models = [checkpoint("llama", seed) for seed in (0, 1)]
    arguments = flashrl.launch_args("vllm", "int8")
    eager = [greedy(engine(model.path, **arguments)) for model in models]
    llm = engine(models[0].path, enforce_eager=False, **arguments)
    session = flashrl.attach(llm, "int8")
    for seed in (1, 0, 1):
        session.update_weights(models[seed].named_tensors())
        assert session.verify(models[seed].named_tensors()).ok
        assert greedy(llm) == eager[seed]
    compiled = engine(models[0].path, enforce_eager=False)
    with pytest.raises(UnsupportedError, match=r"compiled.*launch_args"):
        flashrl.attach(compiled, "int8")
