"""What a vLLM engine refuses, and that it is usable afterwards."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import EngineStateError, NonFiniteError, ShapeError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .conftest import PROMPTS, greedy, worker_of

SHUT_DOWN = """
import sys
import flashrl
from safetensors.torch import load_file
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64,
              num_gpu_blocks_override=64, gpu_memory_utilization=0.1,
              **flashrl.launch_args("vllm", "int8"))
    session = flashrl.attach(llm, "int8")
    weights = load_file(sys.argv[1] + "/model.safetensors")
    session.update_weights(weights.items())
    llm.llm_engine.engine_core.shutdown()
    for call in (lambda: session.update_weights(weights.items()), session.engine.describe):
        try:
            call()
        except flashrl.errors.EngineStateError as error:
            print(type(error).__name__, error)
    print("version", session.version)
"""

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def session(engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]) -> Session:
    llm = engine(checkpoint(seed=0).path, **flashrl.launch_args("vllm", "int8"))
    session = flashrl.attach(llm, "int8")
    session.update_weights(checkpoint(seed=0).named_tensors())
    return session


def model_of(session: Session) -> Any:
    return worker_of(session.engine._engine).get_model()


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.named_tensors()}


# vLLM's own way in, where no session looks at the tensors first.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_plain_load_of_what_is_not_finite_names_the_layer(
    session: Session, checkpoint: Callable[..., Checkpoint], value: float
) -> None:
    bad = weights(checkpoint(seed=1))[Q_PROJ]
    bad[3, 5] = value
    with pytest.raises(NonFiniteError, match=r"layers\.0\.self_attn\.qkv_proj\.weight rows 0"):
        model_of(session).load_weights(iter([(Q_PROJ, bad)]))
    assert session.verify(checkpoint(seed=0).named_tensors()).ok


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor[:-1],
        lambda tensor: tensor.repeat(2, 1),
        lambda tensor: tensor[:, :-16],
        lambda tensor: tensor.long(),
    ],
    ids=["short", "long", "narrow", "int64"],
)
@pytest.mark.parametrize("layer", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_a_plain_load_of_what_does_not_fit_changes_nothing(
    session: Session,
    checkpoint: Callable[..., Checkpoint],
    spoil: Callable[[torch.Tensor], torch.Tensor],
    layer: str,
) -> None:
    name = f"model.layers.1.{layer}.weight"
    bad = spoil(weights(checkpoint(seed=1))[name])
    with pytest.raises(ShapeError, match=r"layers\.1"):
        model_of(session).load_weights(iter([(name, bad)]))
    assert session.verify(checkpoint(seed=0).named_tensors()).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_any_float_type_is_taken(
    session: Session, checkpoint: Callable[..., Checkpoint], dtype: torch.dtype
) -> None:
    pushed = [(n, t.to(dtype)) for n, t in checkpoint(seed=1).named_tensors()]
    session.update_weights(pushed)
    assert session.verify(pushed).ok


def test_a_transposed_view_is_taken(
    session: Session, checkpoint: Callable[..., Checkpoint]
) -> None:
    pushed = {
        n: t.t().contiguous().t() if t.ndim == 2 else t
        for n, t in checkpoint(seed=1).named_tensors()
    }
    session.update_weights(pushed.items())
    assert session.verify(checkpoint(seed=1).named_tensors()).ok


def test_all_zero_weights_stay_finite(
    session: Session, checkpoint: Callable[..., Checkpoint]
) -> None:
    """slime#2256, torchao#4713: scale 1, and tokens come."""
    pushed = weights(checkpoint(seed=0))
    pushed[Q_PROJ].zero_()
    pushed["model.layers.1.mlp.down_proj.weight"].zero_()
    session.update_weights(pushed.items())
    assert session.verify(pushed.items()).ok
    rollout = session.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0.0))
    assert torch.isfinite(rollout.rollout_log_probs).all()


def test_gate_and_up_keep_their_own_scales(
    session: Session, checkpoint: Callable[..., Checkpoint]
) -> None:
    """vllm#47515: up is 2.14 times gate, each half dequantizes by its own scale."""
    pushed = weights(checkpoint(seed=0))
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    pushed[up] = (2.14 * pushed[gate].float()).to(torch.float32)
    pushed[gate] = pushed[gate].float()
    session.update_weights(pushed.items())
    held = dict(session.engine.read_weights([gate, up]))
    largest = {name: tensor.abs().amax(dim=1) for name, tensor in held.items()}
    assert torch.allclose(largest[up], 2.14 * largest[gate], rtol=1e-5)
    step = largest[up][:, None] / 127
    assert ((held[up] - 2.14 * held[gate]).abs() <= 1.01 * step).all()


def test_verify_needs_a_whole_update(
    session: Session, checkpoint: Callable[..., Checkpoint]
) -> None:
    """Weights are part old, part new: version None, and generation refused."""
    with pytest.raises(flashrl.errors.WeightUpdateError, match="never came"):
        session.update_weights(list(checkpoint(seed=1).named_tensors())[:-1])
    assert session.version is None
    with pytest.raises(EngineStateError):
        session.generate(PROMPTS)


# States of the engine.


def test_the_prefix_cache_forgets_what_older_weights_computed(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    """verl#5459."""
    arguments = flashrl.launch_args("vllm", "int8")
    cached = engine(checkpoint(seed=0).path, enable_prefix_caching=True, **arguments)
    session = flashrl.attach(cached, "int8")
    prompt = [list(range(3, 100))]
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(2,))
    answers = []
    for seed in (0, 1, 0):
        session.update_weights(checkpoint(seed=seed).named_tensors())
        rollouts = [session.generate(prompt, params) for _ in range(2)]
        assert rollouts[0].response_ids.tolist() == rollouts[1].response_ids.tolist()
        answers.append(rollouts[1])
    assert torch.equal(answers[0].response_ids, answers[2].response_ids)
    assert torch.allclose(answers[0].rollout_log_probs, answers[2].rollout_log_probs, atol=1e-5)
    assert not torch.equal(answers[0].response_ids, answers[1].response_ids)
    assert [rollout.version for rollout in answers] == [1, 2, 3]


def test_a_push_while_requests_run_is_refused(
    session: Session, checkpoint: Callable[..., Checkpoint]
) -> None:
    from vllm import SamplingParams as Native

    core = session.engine._engine.llm_engine
    core.add_request("one", {"prompt_token_ids": PROMPTS[0]}, Native(max_tokens=20))
    core.step()
    with pytest.raises(EngineStateError, match="generating"):
        session.update_weights(checkpoint(seed=1).named_tensors())
    assert session.version is None
    while core.has_unfinished_requests():
        core.step()
    session.update_weights(checkpoint(seed=1).named_tensors())
    assert session.verify(checkpoint(seed=1).named_tensors()).ok


def test_a_shut_down_engine_says_so(checkpoint: Callable[..., Checkpoint], tmp_path: Path) -> None:
    """In a process of its own, for it takes vLLM's process groups along."""
    script = tmp_path / "shut_down.py"
    script.write_text(SHUT_DOWN)
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoint(seed=0).path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("EngineStateError the vLLM engine is shut down") == 2
    assert "version None" in done.stdout


def test_a_detached_engine_is_16_bit_and_takes_weights(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    llm = engine(checkpoint(seed=0).path, dtype="bfloat16")
    expected = greedy(llm)
    with flashrl.attach(llm, "int8") as session:
        session.update_weights(checkpoint(seed=1).named_tensors())
    model = worker_of(llm).get_model()
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    assert weight.dtype == torch.bfloat16
    model.load_weights(checkpoint(seed=0).named_tensors())
    assert greedy(llm) == expected


def test_tied_embeddings_stay_tied_and_16_bit(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    """VLLM's tied-parameter limit, open-instruct#1387: one push updates both."""
    tied = [checkpoint("llama_tied", seed) for seed in (0, 1)]
    llm = engine(tied[0].path, **flashrl.launch_args("vllm", "int8"))
    session = flashrl.attach(llm, "int8")
    infos = session.engine.weights()
    assert "lm_head.weight" not in infos
    assert infos["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert infos["model.embed_tokens.weight"].scheme is None
    fresh = engine(tied[1].path, **flashrl.launch_args("vllm", "int8"))
    pushed = weights(tied[1])
    pushed["lm_head.weight"] = pushed["model.embed_tokens.weight"]
    session.update_weights(pushed.items())
    assert greedy(llm) == greedy(fresh)


def test_sizes_are_those_of_8_bit(
    session: Session, engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    """Weights exist in 8 bit only, and no copy of them is kept."""
    model = model_of(session)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            assert module.weight.dtype == torch.int8
            assert not hasattr(module, "cpu_linear")
    facts = session.describe()
    sizes = [
        math.prod(info.shape) * info.dtype.itemsize for info in session.engine.weights().values()
    ]
    scales = sum(
        info.shape[0] * 4 for info in session.engine.weights().values() if info.scheme is not None
    )
    padding = (320 - 304) * 256 * 4 * 2  # vLLM pads the vocabulary of embeddings and lm_head
    assert facts["bytes"] == sum(sizes) + scales + padding
