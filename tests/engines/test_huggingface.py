"""The embedded engine: the conformance suite, and what is its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.profiles import Profile
from flashrl.core.rollouts import SamplingParams
from flashrl.core.schemes import get_scheme
from flashrl.errors import (
    AdapterError,
    EngineStateError,
    NonFiniteError,
    ProfileError,
    SchemeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from flashrl.session import Session
from flashrl.testing import EngineConformance, make_checkpoint

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200]]


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


class Embedded(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls) -> Any:
        @contextmanager
        def open_session(checkpoint: Path, scheme: str) -> Iterator[Session]:
            with flashrl.attach(load(checkpoint), scheme) as session:
                yield session

        return open_session


class TestLlama(Embedded):
    schemes = ("int8", "fp8_channel", "fp8_tensor", "fp8_block")


class TestTiedLlama(Embedded):
    architecture = "llama_tied"
    schemes = ("int8",)


class TestQwen2(Embedded):
    architecture = "qwen2"


class TestQwen3(Embedded):
    architecture = "qwen3"
    schemes = ("int8",)


class TestQwen2Moe(Embedded):
    architecture = "qwen2_moe"


class TestMixtral(Embedded):
    architecture = "mixtral"
    schemes = ("int8",)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return make_checkpoint(tmp_path / "a", "qwen2", dtype=torch.float32).model


@pytest.fixture
def other(tmp_path: Path) -> Any:
    return make_checkpoint(tmp_path / "b", "qwen2", seed=1, dtype=torch.float32).model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor(PROMPTS[:1])).logits.clone()


# Addresses, allocations, storage


def test_every_tensor_keeps_its_address(model: Any, other: Any) -> None:
    """vllm#50521, #48438, #48539."""

    def addresses() -> dict[str, int]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    session = flashrl.attach(model, "int8")
    before = addresses()
    for _ in range(3):
        session.update_weights(other.named_parameters())
    assert addresses() == before


def test_untouched_buffers_are_bit_equal_after_an_update(model: Any, other: Any) -> None:
    """vllm#44371."""
    session = flashrl.attach(model, "int8")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before
    session.update_weights(other.named_parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_view_of_a_kept_weight_is_still_one_with_the_new_values(model: Any, other: Any) -> None:
    """vllm#42481, prime-rl#2482."""
    norm = model.model.norm
    norm.register_buffer("view", norm.weight.data.view(-1)[:5])
    session = flashrl.attach(model, "int8")
    session.update_weights(other.named_parameters())
    assert norm.view.data_ptr() == norm.weight.data_ptr()
    assert torch.equal(norm.view, other.model.norm.weight[:5])


def test_unknown_attributes_of_a_parameter_survive(model: Any, other: Any) -> None:
    """Flash-RL#33, #36, #1: no allow-list of attributes, and nothing deleted."""
    session = flashrl.attach(model, "int8")
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight.brand_new = "kept"
    linear.weight.bound = linear.extra_repr
    for _ in range(3):
        session.update_weights(other.named_parameters())
    assert linear.weight.brand_new == "kept"
    assert linear.weight.bound() == linear.extra_repr()


def test_tied_embeddings_stay_tied_and_16_bit(tmp_path: Path) -> None:
    """One push updates both (vLLM's tied-parameter limit, open-instruct#1387)."""
    a, b = (make_checkpoint(tmp_path / str(seed), "llama_tied", seed=seed).model for seed in (0, 1))
    session = flashrl.attach(a, get_scheme("int8").evolve(ignore=()))
    pushed = dict(b.named_parameters())
    assert "lm_head.weight" not in pushed
    session.update_weights(pushed.items())
    assert a.lm_head.weight is a.model.embed_tokens.weight
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    session.update_weights([*pushed.items(), ("lm_head.weight", b.lm_head.weight)])
    assert session.verify(pushed.items()).ok


def test_experts_may_come_stacked_or_apart(tmp_path: Path) -> None:
    """SkyRL#1852."""
    a, b = (make_checkpoint(tmp_path / str(seed), "qwen2_moe", seed=seed) for seed in (0, 1))
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in b.named_tensors():
        stack, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            half = tensor.shape[1] // 2
            for e in range(len(tensor)):
                apart[f"{stack}.experts.{e}.gate_proj.weight"] = tensor[e, :half]
                apart[f"{stack}.experts.{e}.up_proj.weight"] = tensor[e, half:]
        elif part == "down_proj":
            for e in range(len(tensor)):
                apart[f"{stack}.experts.{e}.down_proj.weight"] = tensor[e]
        else:
            apart[name] = tensor
    assert len(apart) > len(dict(b.named_tensors()))
    session = flashrl.attach(a.model, "int8")
    session.update_weights(apart.items())
    assert session.verify(b.named_tensors()).ok


def test_lora_is_merged_once(model: Any) -> None:
    """miles#1087: equal to quantizing base + scale · B · A."""
    name = "model.layers.0.mlp.up_proj"
    session = flashrl.attach(model, "int8")
    base = {n: p.detach().clone() for n, p in _original_tensors(model)}
    lora_a, lora_b = torch.randn(4, 64), torch.randn(96, 4)
    peft = {
        f"base_model.model.{n}".replace(f"{name}.weight", f"{name}.base_layer.weight"): t
        for n, t in base.items()
    }
    peft[f"base_model.model.{name}.lora_A.default.weight"] = lora_a
    peft[f"base_model.model.{name}.lora_B.default.weight"] = lora_b
    session.update_weights(peft.items(), lora_scale=0.5)
    base[f"{name}.weight"] = base[f"{name}.weight"] + 0.5 * lora_b @ lora_a
    assert session.verify(base.items()).ok


def _original_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors a trainer of this shape would push, random but for the kept ones."""
    for name, parameter in model.named_parameters():
        if name.endswith("_scale"):
            continue
        quantized = parameter.dtype == torch.int8
        yield name, torch.randn(parameter.shape) if quantized else parameter.detach()


# Detach


def test_detach_without_an_update_restores_the_model_exactly(model: Any) -> None:
    before, parameters = logits(model), dict(model.named_parameters())
    session = flashrl.attach(model, "int8")
    assert not torch.equal(logits(model), before)
    session.detach()
    assert torch.equal(logits(model), before)
    assert all(p is parameters[name] for name, p in model.named_parameters())


def test_detach_after_an_update_restores_the_newest_weights(model: Any, other: Any) -> None:
    session = flashrl.attach(model, "int8")
    session.update_weights(other.named_parameters())
    eight_bit = dict(session.engine.read_weights(list(session.engine.weights())))
    session.detach()
    restored = dict(model.named_parameters())
    assert restored.keys() == dict(other.named_parameters()).keys()
    for name, parameter in restored.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, eight_bit[name])


def test_detach_restores_experts(tmp_path: Path) -> None:
    a, b = (
        make_checkpoint(tmp_path / str(seed), "mixtral", seed=seed, dtype=torch.float32).model
        for seed in (0, 1)
    )
    with flashrl.attach(a, "int8") as session:
        session.update_weights(b.named_parameters())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    restored, pushed = dict(a.named_parameters())[name], dict(b.named_parameters())[name]
    step = pushed.abs().amax(dim=2, keepdim=True) / 127
    assert bool(((restored - pushed).abs() <= step * 0.51).all())


def test_the_bf16_scheme_quantizes_nothing(model: Any, other: Any) -> None:
    before = logits(model)
    session = flashrl.attach(model, "bf16")
    assert torch.equal(logits(model), before)
    session.update_weights(other.named_parameters())
    assert torch.equal(logits(model), logits(other))


# Profiles, static scales, pruning

NORM = "model.layers.0.input_layernorm.weight"
READERS = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]


def make_profile(**changes: Any) -> Profile:
    return Profile(
        **{
            "scheme": "int8",
            "smoothing": {NORM: torch.linspace(0.5, 4.0, 64)},
            "groups": {NORM: READERS},
            **changes,
        }
    )


def test_smoothing_is_applied_at_attach_and_at_every_update(model: Any, other: Any) -> None:
    profile = make_profile()
    factors = torch.linspace(0.5, 4.0, 64)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    session = flashrl.attach(model, "int8", profile=profile)
    for pushed in (weights, dict(other.named_parameters())):
        session.update_weights(pushed.items())
        held = dict(session.engine.read_weights([NORM, READERS[0]]))
        assert torch.allclose(held[NORM], pushed[NORM] / factors)
        smoothed = pushed[READERS[0]] * factors
        step = smoothed.abs().amax(dim=1, keepdim=True) / 127
        assert bool(((held[READERS[0]] - smoothed).abs() <= step * 0.51).all())
        assert session.verify(pushed.items()).ok


def test_smoothing_leaves_the_model_as_it_was_after_detach(model: Any) -> None:
    before = logits(model)
    flashrl.attach(model, "int8", profile=make_profile()).detach()
    assert torch.equal(logits(model), before)


def test_smoothing_is_undone_after_an_update(model: Any, other: Any) -> None:
    session = flashrl.attach(model, "int8", profile=make_profile())
    session.update_weights(other.named_parameters())
    session.detach()
    assert torch.equal(model.model.layers[0].input_layernorm.weight, other.state_dict()[NORM])
    restored, pushed = model.state_dict()[READERS[0]], other.state_dict()[READERS[0]]
    assert torch.allclose(restored, pushed, atol=0.2)


def test_static_scales_stay_and_clip(model: Any) -> None:
    """A profile's scales are kept while weights drift, as the original's were."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    scales = {
        name: torch.full((tensor.shape[0], 1), 0.01)
        for name, tensor in weights.items()
        if name.endswith("_proj.weight")
    }
    static = get_scheme("int8").evolve(dynamic=False)
    session = flashrl.attach(
        model, static, profile=make_profile(scales=scales, smoothing={}, groups={})
    )
    weights[READERS[0]] = torch.full_like(weights[READERS[0]], 1.6)
    session.update_weights(weights.items())
    [(_, held)] = session.engine.read_weights(READERS[:1])
    assert torch.allclose(held, torch.full_like(held, 1.27))
    assert session.verify(weights.items()).ok


def test_static_scales_without_a_profile_are_refused(model: Any) -> None:
    before = logits(model)
    with pytest.raises(SchemeError, match=r"static scales.*q_proj"):
        flashrl.attach(model, get_scheme("int8").evolve(dynamic=False))
    assert torch.equal(logits(model), before)


def test_a_profile_of_another_model_is_refused(model: Any) -> None:
    before = logits(model)
    with pytest.raises(ProfileError, match="64"):
        flashrl.attach(model, "int8", profile=make_profile(smoothing={NORM: torch.ones(32)}))
    assert torch.equal(logits(model), before)


def test_int8_prune_zeroes_channels_that_nothing_reads(model: Any) -> None:
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    session = flashrl.attach(model, "int8_prune")
    for name in READERS:
        weights[name][:, 3] = 0.0
    weights[READERS[0]][:, 5] = 0.0
    for pushes in ([weights.items()], [[pair] for pair in weights.items()]):
        with session.update() as update:
            for push in pushes:
                update.push(push)
        [(_, norm)] = session.engine.read_weights([NORM])
        assert norm[3] == 0.0
        assert bool((norm[torch.arange(64) != 3] != 0).all())
        assert session.verify(weights.items()).ok


# Generation


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, seed=1),
        SamplingParams(max_tokens=12, seed=2, temperature=0.6),
        SamplingParams(max_tokens=12, temperature=0.0),
    ],
    ids=["plain", "temperature", "greedy"],
)
def test_log_probs_are_those_of_the_models_own_logits(model: Any, params: SamplingParams) -> None:
    """In float64, from the logits of the very steps that were sampled."""
    session = flashrl.attach(model, "int8")
    steps: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: steps.append(call[-1][:, -1].clone()))
    rollout = session.generate(PROMPTS, params)
    hook.remove()
    assert len(steps) == rollout.response_ids.shape[1]
    for step, raw in enumerate(steps):
        reference = (raw.double() / (params.temperature or 1.0)).log_softmax(-1)
        for row in rollout.response_mask[:, step].nonzero().flatten().tolist():
            token = int(rollout.response_ids[row, step])
            got = rollout.rollout_log_probs[row, step].item()
            assert got == pytest.approx(reference[row, token].item(), abs=1e-5)


def test_padding_and_cache_do_not_change_the_distribution(model: Any) -> None:
    """Against a teacher-forced pass, one sequence at a time; bf16, so that no code flips."""
    session = flashrl.attach(model, "bf16")
    rollout = session.generate(PROMPTS, SamplingParams(max_tokens=12, seed=1))
    for row, prompt in enumerate(PROMPTS):
        length = int(rollout.response_mask[row].sum())
        response = rollout.response_ids[row, :length]
        with torch.inference_mode():
            tokens = torch.tensor([prompt + response.tolist()])
            raw = model(tokens).logits[0, len(prompt) - 1 : -1]
        reference = raw.double().log_softmax(-1)[torch.arange(length), response]
        assert torch.allclose(
            rollout.rollout_log_probs[row, :length].double(), reference, atol=2e-4
        )


def test_penalties_and_bias_act_and_are_reported(model: Any) -> None:
    """The original's patched sampler ignored penalties, min_p and logit_bias."""
    session = flashrl.attach(model, "int8")
    biased = session.generate(PROMPTS, SamplingParams(max_tokens=3, seed=0, logit_bias={7: 1000.0}))
    assert bool((biased.response_ids == 7).all())
    assert torch.allclose(biased.rollout_log_probs, torch.zeros(3, 3), atol=1e-5)
    repeated = session.generate(
        PROMPTS,
        SamplingParams(
            max_tokens=6, temperature=0.0, logit_bias={7: 1000.0}, frequency_penalty=400.0
        ),
    )
    assert (repeated.response_ids == 7).sum(dim=1).tolist() == [3, 3, 3]


def test_the_checkpoints_own_generation_defaults_stay_out(model: Any) -> None:
    session = flashrl.attach(model, "int8")
    params = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(2,))
    plain = session.generate(PROMPTS, params)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.no_repeat_ngram_size = 1
    assert torch.equal(session.generate(PROMPTS, params).response_ids, plain.response_ids)
    assert model.generation_config.repetition_penalty == 50.0


def test_a_seed_repeats_a_rollout_and_leaves_the_global_state_alone(model: Any) -> None:
    session = flashrl.attach(model, "int8")
    params = SamplingParams(max_tokens=8, seed=11)
    state = torch.get_rng_state()
    first = session.generate(PROMPTS, params)
    assert torch.equal(torch.get_rng_state(), state)
    second = session.generate(PROMPTS, params)
    assert torch.equal(first.response_ids, second.response_ids)
    assert torch.equal(first.rollout_log_probs, second.rollout_log_probs)


def test_the_stop_token_is_part_of_the_response_and_padding_is_not(model: Any) -> None:
    session = flashrl.attach(model, "int8")
    rollout = session.generate(
        PROMPTS, SamplingParams(max_tokens=5, seed=0, logit_bias={9: 1e4}, stop_token_ids=(9,))
    )
    assert rollout.response_ids[:, 0].tolist() == [9, 9, 9]
    assert rollout.response_mask.sum(dim=1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("prompts", [[], [[1, 2], []]])
def test_empty_prompts_are_refused(model: Any, prompts: list[list[int]]) -> None:
    with pytest.raises(ShapeError, match="prompt"):
        flashrl.attach(model, "int8").generate(prompts)


def test_a_push_during_generation_is_refused(model: Any, other: Any) -> None:
    session = flashrl.attach(model, "int8")
    entered, leave = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        entered.set()
        leave.wait(30)

    handle = model.register_forward_pre_hook(pause)
    worker = threading.Thread(target=session.generate, args=(PROMPTS,))
    worker.start()
    assert entered.wait(30)
    with pytest.raises(EngineStateError, match="busy"):
        session.update_weights(other.named_parameters())
    leave.set()
    worker.join()
    handle.remove()
    session.update_weights(other.named_parameters())
    assert session.verify(other.named_parameters()).ok


# What is refused


def test_a_model_with_nan_is_refused_and_left_alone(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    before = [type(module) for module in model.modules()]
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj"):
        flashrl.attach(model, "int8")
    assert [type(module) for module in model.modules()] == before


def test_a_scheme_that_fits_nothing_is_refused(model: Any) -> None:
    with pytest.raises(SchemeError, match="fits no layer"):
        flashrl.attach(model, get_scheme("int8").evolve(targets=("Conv2d",)))


def test_unknown_schemes_and_engines_are_named(model: Any) -> None:
    with pytest.raises(UnknownNameError, match="int8"):
        flashrl.attach(model, "int7")
    with pytest.raises(AdapterError, match="huggingface"):
        flashrl.attach(object(), "int8")
    with pytest.raises(UnknownNameError, match="huggingface"):
        flashrl.launch_args("hugingface")


def test_launch_args_says_what_to_do_instead() -> None:
    with pytest.raises(UnsupportedError, match=r"flashrl\.attach"):
        flashrl.launch_args("huggingface", "int8")
