"""Profiles in vLLM: every pushed tensor is smoothed on its way in, however it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import flashrl
from flashrl.core.profiles import Profile
from flashrl.core.rollouts import SamplingParams
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.errors import ProfileError, SchemeError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .conftest import PROMPTS, greedy, worker_of
from .w8a8 import calibrate, is_linear, make_w8a8, quantize, smooth

# As many key-value heads as heads: then v_proj, its bias and o_proj are smoothed too.
ALL_HEADS = {"num_key_value_heads": 4}
SCHEMES = {
    "dynamic": get_scheme("int8"),
    "static": get_scheme("int8").evolve(name="int8_static", dynamic=False),
    "prune": get_scheme("int8_prune"),
    "static_prune": get_scheme("int8_prune").evolve(name="both", dynamic=False),
}


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Checkpoint]) -> list[Checkpoint]:
    return [checkpoint("qwen2", seed, **ALL_HEADS) for seed in (0, 1)]


@pytest.fixture(scope="module")
def profile(models: list[Checkpoint]) -> Profile:
    found = calibrate(models[0])
    assert any("norm" in name for name in found.smoothing)
    assert any("v_proj" in name for name in found.smoothing)
    assert any("up_proj" in name for name in found.smoothing)
    return found


@pytest.fixture(params=["started", "attached"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start_16_bit(engine: Callable[..., Any], model: Checkpoint) -> Any:
    """The 16-bit engine that these tests share, with a model's weights."""
    llm = engine(model.path, max_num_seqs=9)
    flashrl.attach(llm, "bf16").update_weights(model.named_tensors())
    flashrl.attach(llm, "bf16").detach()
    return llm


def open_session(
    engine: Callable[..., Any], model: Checkpoint, scheme: QuantScheme, profile: Profile, how: str
) -> Session:
    """A session on an engine that was started with a profile, or takes one while it runs."""
    if how == "attached":
        return flashrl.attach(start_16_bit(engine, model), scheme, profile=profile)
    # The path of the profile would differ at every call.
    arguments = _ARGUMENTS.setdefault(
        scheme.name, dict(flashrl.launch_args("vllm", scheme, profile=profile))
    )
    return flashrl.attach(engine(model.path, **arguments), scheme, profile=profile)


_ARGUMENTS: dict[str, Any] = {}


def weights(model: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_tensors()}


def with_dead_channels(pushed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two channels that no weight behind the first norm reads, and one that a single one reads."""
    readers = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    for name in readers:
        pushed[name][:, [3, 8]] = 0.0
        pushed[name][:, 5] = 0.0
    pushed[readers[1]][0, 5] = 1.0
    return pushed


PATHS: dict[str, Callable[[Session, dict[str, torch.Tensor]], Any]] = {
    "session": lambda session, w: session.update_weights(w.items()),
    "one at a time": lambda session, w: [
        model_of(session).load_weights(iter([pair])) for pair in w.items()
    ],
    "list": lambda session, w: model_of(session).load_weights(list(w.items())),
    "backwards": lambda session, w: model_of(session).load_weights(iter(reversed(w.items()))),
    "reload": lambda session, w: worker_of(session.engine._engine).model_runner.reload_weights(
        weights_iterator=iter(w.items())
    ),
}


def model_of(session: Session) -> Any:
    return worker_of(session.engine._engine).get_model()


@pytest.mark.parametrize("kind", SCHEMES)
def test_pushes_equal_the_reference_bit_for_bit(
    engine: Callable[..., Any],
    models: list[Checkpoint],
    profile: Profile,
    kind: str,
    how: str,
) -> None:
    """Against naive arithmetic, and against the core's reference for all tensors."""
    scheme = SCHEMES[kind]
    session = open_session(engine, models[0], scheme, profile, how)
    assert session.verify(weights(models[0]).items()).ok
    for step, push in enumerate(PATHS.values(), start=1):
        pushed = weights(models[step % 2])
        if scheme.prune_dead_neurons and step % 2:
            with_dead_channels(pushed)
        push(session, pushed)
        check_by_hand(session, pushed, profile, scheme)
        session.version = step
        assert session.verify(pushed.items()).ok
    if how == "attached":
        session.detach()


def check_by_hand(
    session: Session, pushed: dict[str, torch.Tensor], profile: Profile, scheme: QuantScheme
) -> None:
    held = dict(session.engine.read_weights(list(pushed)))
    for name, tensor in pushed.items():
        expected = smooth(name, tensor, profile)
        if is_linear(name) and scheme.dynamic:
            values, scale = quantize(expected)
            expected = values.float() * scale
        elif is_linear(name):
            scale = profile.scales[name]
            expected = torch.round(expected / scale).clamp(-127, 127) * scale
        elif scheme.prune_dead_neurons and name == "model.layers.0.input_layernorm.weight":
            readers = [held[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
            expected = torch.where((torch.cat(readers) != 0).any(dim=0), expected, 0.0)
            if (pushed["model.layers.0.self_attn.q_proj.weight"][:, 3] == 0).all():
                assert expected[[3, 8]].tolist() == [0.0, 0.0]
                assert expected[5] != 0.0
        assert torch.equal(held[name], expected), name


def test_smoothing_does_not_change_the_model(
    engine: Callable[..., Any], models: list[Checkpoint], profile: Profile
) -> None:
    """Log-probabilities of the smoothed INT8 model are those of the 16-bit one, about."""
    plain = flashrl.attach(start_16_bit(engine, models[0]), "bf16")
    params = SamplingParams(temperature=0.0, max_tokens=1)
    exact = plain.generate(PROMPTS, params)
    session = open_session(engine, models[0], SCHEMES["dynamic"], profile, "started")
    session.update_weights(weights(models[0]).items())
    smoothed = session.generate(PROMPTS, params)
    assert torch.allclose(smoothed.rollout_log_probs, exact.rollout_log_probs, atol=0.3)
    plain.detach()


def test_a_detached_engine_has_what_was_pushed(
    engine: Callable[..., Any], models: list[Checkpoint], profile: Profile
) -> None:
    """Norms exactly, linears within a step of 8 bit; and it answers as 16-bit engines do."""
    for pushes in (0, 1):
        llm = start_16_bit(engine, models[0])
        session = flashrl.attach(llm, "int8", profile=profile)
        model = models[0]
        for _ in range(pushes):
            model = models[1]
            session.update_weights(model.named_tensors())
        session.detach()
        held = dict(worker_of(llm).get_model().named_parameters())
        original = weights(model)
        norm = "model.layers.1.post_attention_layernorm.weight"
        assert torch.equal(held[norm].float(), original[norm].float())
        name = "model.layers.1.mlp.down_proj.weight"
        difference = held[name].float() - original[name].float()
        step = (smooth(name, original[name], profile).abs().amax(dim=1) / 127)[:, None]
        reach = profile.smoothing["model.layers.1.mlp.up_proj.weight"]
        assert (difference.abs() <= 0.51 * step / reach + 1e-6).all()
        assert "load_weights" not in vars(worker_of(llm).get_model())


def test_a_profile_that_does_not_fit_is_refused_and_nothing_changes(
    engine: Callable[..., Any], models: list[Checkpoint], profile: Profile
) -> None:
    llm = start_16_bit(engine, models[0])
    before = greedy(llm)
    smoothing = {name: s for name, s in profile.smoothing.items() if "layers.0" in name}
    groups = {name: profile.groups[name] for name in smoothing}
    wrong = {name: torch.cat([s, s]) for name, s in smoothing.items()}
    with pytest.raises(ProfileError, match="channels"):
        flashrl.attach(llm, "int8", profile=attrs.evolve(profile, smoothing=wrong, groups=groups))
    lacking = attrs.evolve(profile, scales={}, weights=profile.weights)
    with pytest.raises(SchemeError, match="static scales"):
        flashrl.attach(llm, SCHEMES["static"], profile=lacking)
    with pytest.raises(SchemeError, match=r"dynamic: false.*profile"):
        flashrl.attach(llm, SCHEMES["static"])
    assert greedy(llm) == before


def test_attaching_without_the_profile_that_an_engine_was_started_with_is_an_error(
    engine: Callable[..., Any], models: list[Checkpoint], profile: Profile
) -> None:
    """verify would compare with the wrong reference."""
    open_session(engine, models[0], SCHEMES["dynamic"], profile, "started")
    llm = engine(models[0].path, **_ARGUMENTS["int8"])
    with pytest.raises(SchemeError, match="started with a profile"):
        flashrl.attach(llm, "int8")


@pytest.mark.parametrize("smoothed", [True, False], ids=["profile", "plain"])
def test_a_quantized_checkpoint_starts_an_engine_and_16_bit_is_pushed(
    engine: Callable[..., Any],
    models: list[Checkpoint],
    profile: Profile,
    tmp_path_factory: pytest.TempPathFactory,
    smoothed: bool,
) -> None:
    """What ``flashrl setup -m …-quantized.w8a8`` is for: it is taken as it is, then pushes come."""
    folder = tmp_path_factory.mktemp("w8a8")
    nothing = Profile(scheme="int8")
    used = profile if smoothed else nothing
    copy = make_w8a8(models[0].path, folder / "copy", used)
    arguments = flashrl.launch_args("vllm", "int8", profile=used if smoothed else None)
    llm = engine(copy, **arguments)
    session = flashrl.attach(llm, "int8", profile=used if smoothed else None)
    infos = session.engine.weights()
    assert set(infos) == set(weights(models[0]))
    held = dict(session.engine.read_weights(list(infos)))
    for name, tensor in weights(models[0]).items():
        expected = smooth(name, tensor, used)
        if is_linear(name):
            values, scale = quantize(expected)
            expected = values.float() * scale
        else:
            expected = expected.to(tensor.dtype).float()
        assert torch.equal(held[name], expected), name
    for model in (models[1], models[0]):
        session.update_weights(model.named_tensors())
        assert session.verify(model.named_tensors()).ok
