"""Mixtures of experts: every way in, and every expert against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashrl
from flashrl.errors import NonFiniteError, SchemeError, ShapeError, UnsupportedError
from flashrl.testing import Checkpoint

from .conftest import greedy, worker_of


def make(checkpoint: Callable[..., Checkpoint], architecture: str, seed: int = 0) -> Checkpoint:
    extra = {
        "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
        "qwen3_moe": {"moe_intermediate_size": 128, "head_dim": 64},
        "mixtral": {},
    }[architecture]
    return checkpoint(architecture, seed, **extra)


def on_disk(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint.path / "model.safetensors")


@pytest.mark.parametrize("scheme", ["int8", "fp8_channel"])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_five_alternating_pushes(
    engine: Callable[..., Any],
    checkpoint: Callable[..., Checkpoint],
    architecture: str,
    scheme: str,
) -> None:
    models = [make(checkpoint, architecture, seed) for seed in (0, 1)]
    arguments = flashrl.launch_args("vllm", scheme)
    llm, fresh = (engine(model.path, **arguments) for model in models)
    session = flashrl.attach(llm, scheme)
    weights = [on_disk(model) for model in models]
    quantized = [n for n, info in session.engine.weights().items() if info.scheme is not None]
    assert sum(".experts." in name for name in quantized) == 2 * 4 * 3
    assert not any(name.endswith("gate.weight") for name in quantized)
    assert session.verify(weights[0].items()).ok
    answers = [greedy(llm), greedy(fresh)]
    assert answers[0] != answers[1]
    runner = worker_of(llm).model_runner
    pushes: list[Callable[[dict[str, torch.Tensor]], Any]] = [
        lambda w: session.update_weights(w.items()),
        lambda w: [runner.model.load_weights(iter([pair])) for pair in w.items()],
        lambda w: runner.reload_weights(weights_iterator=iter(w.items())),
        lambda w: runner.model.load_weights(iter(reversed(w.items()))),
        lambda w: session.update_weights(reversed(w.items())),
    ]
    for step, push in enumerate(pushes, start=1):
        push(weights[step % 2])
        assert session.verify(weights[step % 2].items()).ok
        assert greedy(llm) == answers[step % 2]


def test_an_expert_is_its_own_product(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    """Against transformers' experts in float64, within the step of 8 bit."""
    model = make(checkpoint, "qwen2_moe")
    llm = engine(model.path, **flashrl.launch_args("vllm", "int8"))
    flashrl.attach(llm, "int8").update_weights(on_disk(model).items())
    layers = worker_of(llm).get_model().model.layers
    experts = next(
        module for module in layers[0].mlp.modules() if hasattr(module, "w13_weight_scale")
    )
    x = torch.randn(9, 256)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    y = experts.quant_method.apply(experts, x, weights, ids)
    stacked = model.model.model.layers[0].mlp.experts
    gate_up, down = (p.detach().double() for p in (stacked.gate_up_proj, stacked.down_proj))
    expected = torch.zeros(9, 256, dtype=torch.float64)
    for token in range(9):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token].double()).chunk(2)
            gated = torch.nn.functional.silu(gate) * up
            expected[token] += weight.double() * (down[expert] @ gated)
    assert (y - expected).abs().max() < 0.05 * expected.abs().max()


def test_what_does_not_fit_an_expert_changes_nothing(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    model = make(checkpoint, "qwen2_moe")
    llm = engine(model.path, **flashrl.launch_args("vllm", "int8"))
    session = flashrl.attach(llm, "int8")
    weights = on_disk(model)
    session.update_weights(weights.items())
    load = worker_of(llm).get_model().load_weights
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(ShapeError, match=r"layers\.1\.mlp\.experts.*expert 2"):
        load(iter([(name, weights[name][:-1])]))
    bad = weights[name].clone()
    bad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.experts"):
        load(iter([(name, bad)]))
    assert session.verify(weights.items()).ok


def test_experts_do_not_run_in_blocks_and_do_not_change_while_running(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    model = make(checkpoint, "qwen3_moe")
    with pytest.raises(SchemeError, match=r"experts.*fp8_channel"):
        engine(model.path, **flashrl.launch_args("vllm", "fp8_block"))
    llm = engine(model.path)
    with pytest.raises(UnsupportedError, match=r"experts.*launch_args"):
        flashrl.attach(llm, "int8")
