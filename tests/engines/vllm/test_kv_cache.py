"""An FP8 KV cache, whose scales follow the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.rollouts import SamplingParams
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.errors import ConfigError, UnsupportedError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .conftest import PROMPTS, worker_of
from .test_weight_paths import PATHS, addresses

SCHEME = get_scheme("int8").evolve(name="int8_kv", kv_cache="fp8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def start(engine: Callable[..., Any]) -> Callable[..., Session]:
    def start(checkpoint: Checkpoint, scheme: QuantScheme = SCHEME, **arguments: Any) -> Session:
        llm = engine(checkpoint.path, **{**flashrl.launch_args("vllm", scheme), **arguments})
        session = flashrl.attach(llm, scheme)
        session.update_weights(checkpoint.named_tensors())
        return session

    return start


def attentions(session: Session) -> dict[str, Any]:
    model = worker_of(session.engine._engine).get_model()
    return {name: m for name, m in model.named_modules() if hasattr(m, "_k_scale")}


def scales(session: Session) -> dict[str, list[float]]:
    found: dict[str, list[float]] = session.describe()["kv_cache_scales"]
    return found


def expected_scales(session: Session, layer: int) -> tuple[float, float]:
    """Key's and value's, in float64, from the weights that the engine multiplies by."""
    prefix = f"model.layers.{layer}."
    names = session.engine.weights()
    held = {n: t.double() for n, t in session.engine.read_weights(list(names))}
    factors = held[f"{prefix}input_layernorm.weight"]
    found = []
    for part in ("k", "v"):
        name = f"{prefix}self_attn.{part}_proj"
        weight = held[f"{name}.weight"] * factors
        bound = (weight.square().sum(dim=1) * weight.shape[1]).sqrt()
        bound = bound + held.get(f"{name}.bias", torch.zeros(1)).abs()
        largest = float(bound.max()) * (math.sqrt(2) if part == "k" else 1)
        norm = held.get(f"{prefix}self_attn.{part}_norm.weight")
        if norm is not None:
            largest = math.sqrt(norm.numel()) * float(norm.abs().max())
        found.append(2.0 ** math.ceil(math.log2(largest / 448)))
    return found[0], found[1]


@contextmanager
def largest(session: Session) -> Iterator[dict[str, tuple[float, float]]]:
    """Largest key and value that each layer is given."""
    seen: dict[str, tuple[float, float]] = {}

    def note(name: str, *given: torch.Tensor) -> None:
        before = seen.get(name, (0.0, 0.0))
        seen[name] = tuple(max(b, float(g.abs().max())) for b, g in zip(before, given, strict=True))

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: note(name, *args[1:3]))
        for name, module in attentions(session).items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_scales_hold_what_the_cache_is_given(
    start: Callable[..., Session], checkpoint: Callable[..., Checkpoint], architecture: str
) -> None:
    config = {"head_dim": 64} if architecture == "qwen3" else {}
    session = start(checkpoint(architecture, **config))
    with largest(session) as seen:
        session.generate(PROMPTS, GREEDY)
    assert len(seen) == 2
    for index, (name, module) in enumerate(attentions(session).items()):
        assert module.kv_cache.element_size() == 1
        _, key, value = scales(session)[name]
        assert (key, value) == expected_scales(session, index)
        assert (module._k_scale_float, module._v_scale_float) == (key, value)
        assert 0 < seen[name][0] <= 448 * key
        assert 0 < seen[name][1] <= 448 * value


def grown(checkpoint: Checkpoint, factor: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The same model with larger keys and values: queries and o_proj make up for it."""
    for name, tensor in checkpoint.named_tensors():
        if ".k_proj." in name or ".v_proj." in name:
            tensor = tensor * factor
        elif ".q_proj." in name or ".o_proj." in name:
            tensor = tensor / factor
        yield name, tensor


def test_keys_and_values_of_any_size_are_as_exact(
    start: Callable[..., Session], checkpoint: Callable[..., Checkpoint]
) -> None:
    """NeMo-RL#3225: a scale that stays at 1.0 would saturate at 448."""
    session = start(checkpoint("qwen2"))
    rollouts = [session.generate(PROMPTS, GREEDY)]
    before = scales(session)
    for factor in (2.0**12, 2.0**-12):
        session.update_weights(grown(checkpoint("qwen2"), factor))
        rollouts.append(session.generate(PROMPTS, GREEDY))
        for name, (_, key, value) in scales(session).items():
            assert key == before[name][1] * factor
            assert value == before[name][2] * factor
    for module in attentions(session).values():
        module._k_scale_float = module._v_scale_float = 1.0
    session.engine._engine.reset_prefix_cache()
    lost = session.generate(PROMPTS, GREEDY)
    session.update_weights(checkpoint("qwen2").named_tensors())
    for rollout in rollouts[1:]:
        assert torch.equal(rollout.response_ids, rollouts[0].response_ids)
        difference = rollout.rollout_log_probs - rollouts[0].rollout_log_probs
        assert difference.abs().max() < 1e-4
    assert (lost.rollout_log_probs - rollouts[0].rollout_log_probs).abs().max() > 0.01


def test_log_probs_are_as_close_to_a_16_bit_cache_as_with_the_tightest_scales(
    start: Callable[..., Session], checkpoint: Callable[..., Checkpoint]
) -> None:
    """What the bounds are looser than the values costs nothing that e4m3 does not cost anyway."""
    model = checkpoint("llama")
    full = start(model, get_scheme("int8")).generate(PROMPTS, GREEDY)
    session = start(model)
    with largest(session) as seen:
        rollouts = [session.generate(PROMPTS, GREEDY)]
    for name, module in attentions(session).items():
        for part, value in zip("kv", seen[name], strict=True):
            tight = 2.0 ** math.ceil(math.log2(value / 448))
            assert tight < getattr(module, f"_{part}_scale_float")
            setattr(module, f"_{part}_scale_float", tight)
    session.engine._engine.reset_prefix_cache()
    rollouts.append(session.generate(PROMPTS, GREEDY))
    session.update_weights(model.named_tensors())
    errors = []
    for rollout in rollouts:
        assert torch.equal(rollout.response_ids, full.response_ids)
        difference = rollout.rollout_log_probs - full.rollout_log_probs
        errors.append(float(difference.abs().mean()))
    assert 0 < errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("how", ["started", "attached"])
@pytest.mark.parametrize("way", ["one_tensor_at_a_time", "reload_weights", "weight_transfer"])
def test_scales_follow_every_way_in(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint], how: str, way: str
) -> None:
    """Also where vLLM resets them to 1.0 after a reload; and they never move."""
    from .file_transfer import transfer_arguments

    arguments = {"kv_cache_dtype": "fp8", **transfer_arguments()}
    if how == "started":
        arguments.update(flashrl.launch_args("vllm", SCHEME))
    models = [checkpoint(seed=0), checkpoint(seed=1, initializer_range=0.4)]
    llm = engine(models[0].path, **arguments)
    session = flashrl.attach(llm, SCHEME)
    kept, seen = addresses(llm), []
    for seed in (1, 0, 1):
        model = models[seed]
        PATHS[way](llm, model)
        for index, (name, module) in enumerate(attentions(session).items()):
            key, value = expected_scales(session, index)
            assert scales(session)[name][1:] == [key, value]
            assert (module._k_scale_float, module._v_scale_float) == (key, value)
            assert (float(module._k_scale_cpu), float(module._v_scale_cpu)) == (key, value)
            assert key != 1.0
        seen.append(scales(session))
    assert seen[0] != seen[1]
    assert addresses(llm) == kept


def test_a_cache_that_the_user_asked_for_has_scales_too(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    arguments = flashrl.launch_args("vllm", "int8")
    llm = engine(checkpoint(seed=0).path, kv_cache_dtype="fp8", **arguments)
    session = flashrl.attach(llm, "int8")
    for index, (_, key, value) in enumerate(scales(session).values()):
        assert (key, value) == expected_scales(session, index)


def test_what_has_no_scales_is_refused(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    llm = engine(checkpoint(seed=0).path)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='fp8'"):
        flashrl.attach(llm, SCHEME)
    e5m2 = engine(checkpoint(seed=0).path, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(UnsupportedError, match="fp8_e5m2"):
        flashrl.attach(e5m2, "int8")
    with pytest.raises(UnsupportedError, match="KV cache"):
        flashrl.launch_args("vllm", get_scheme("bf16").evolve(name="kv", kv_cache="fp8"))


def test_a_configuration_asks_for_it(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from flashrl.engines.vllm.arguments import configure

    file = tmp_path / "config.yaml"
    monkeypatch.setenv("FLASHRL_CONFIG", str(file))
    file.write_text("configs: [{fn: int8, kv_cache: fp8}]")
    args = EngineArgs(model=str(checkpoint().path))
    configure(args)
    assert args.kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='bfloat16'.*'fp8'"):
        configure(EngineArgs(model=str(checkpoint().path), kv_cache_dtype="bfloat16"))
    file.write_text("configs: [{fn: int8, kv_cache: fp8}, {fn: int8}]")
    with pytest.raises(ConfigError, match="KV cache"):
        configure(EngineArgs(model=str(checkpoint().path), data_parallel_size=2))
