"""An engine that was started 8-bit: every way in for weights, and nothing that ends it."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import flashrl
from flashrl.core.rollouts import SamplingParams
from flashrl.core.schemes import get_scheme
from flashrl.errors import EngineStateError, UnsupportedError, WeightUpdateError
from flashrl.session import Session
from flashrl.testing import Checkpoint

Checkpoints = tuple[Checkpoint, Checkpoint]

PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200]]
CULPRIT = "model.layers.0.mlp.gate_proj.weight"
GREEDY = {"temperature": 0.0, "max_new_tokens": 8}


def generate(engine: Any, **params: Any) -> list[list[int]]:
    """SGLang's own call, as a user's script has it."""
    answers = engine.generate(input_ids=PROMPTS, sampling_params={**GREEDY, **params})
    return [answer["output_ids"] for answer in answers]


@contextmanager
def sglang_session(engine: Any) -> Iterator[None]:
    """What newer versions want around pushes, once the engine counts every request as finished."""
    while not engine.flush_cache().success:
        time.sleep(0.02)
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


@pytest.fixture(scope="module")
def fresh_answers(
    pool: Any, launched: Any, wide_checkpoints: Checkpoints
) -> tuple[list[list[int]], list[list[int]]]:
    """What engines say that never saw an update: one started 8-bit from A, one attached to B."""
    from_a = generate(launched)
    with (
        pool.borrow(wide_checkpoints[1].path, "qwen2") as engine,
        flashrl.attach(engine, "int8"),
    ):
        from_b = generate(engine)
    assert from_a != from_b
    return from_a, from_b


@pytest.fixture
def session(
    launched_session: Session, fresh_answers: object, wide_checkpoints: Checkpoints
) -> Session:
    """The engine that was started 8-bit, holding A."""
    launched_session.update_weights(wide_checkpoints[0].named_tensors())
    return launched_session


@pytest.fixture
def engine(session: Session, launched: Any) -> Any:
    """The same, as SGLang has it."""
    return launched


def bucket(pairs: list[tuple[str, Tensor]]) -> list[Any]:
    """A flattened bucket, as verl and slime send it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=pairs)
    payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return [MultiprocessingSerializer.serialize(payload, output_str=True)]


def fused(pairs: Iterator[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
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


# Every way in.


def test_alternating_pushes_equal_the_reference_and_fresh_engines(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any
) -> None:
    for step in range(5):
        which = (step + 1) % 2
        session.update_weights(wide_checkpoints[which].named_tensors())
        assert session.verify(wide_checkpoints[which].named_tensors()).ok
        assert generate(engine) == fresh_answers[which]


@pytest.mark.parametrize("way", ["named", "flattened_bucket", "direct", "one by one"])
def test_sglangs_own_pushes_load_16_bit(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any, way: str
) -> None:
    pairs = [(n, t.clone()) for n, t in wide_checkpoints[1].named_tensors()]
    if way == "flattened_bucket":
        answers = [push(engine, bucket(pairs), load_format=way)]
    elif way == "direct":
        answers = [push(engine, fused(iter(pairs)), load_format=way)]
    elif way == "one by one":
        answers = [push(engine, [pair]) for pair in pairs]
    else:
        answers = [push(engine, pairs)]
    assert all(success for success, _ in answers), answers
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
    assert generate(engine) == fresh_answers[1]


def test_weights_load_from_disk(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any
) -> None:
    success, message, *_ = engine.update_weights_from_disk(str(wide_checkpoints[1].path))
    assert success, message
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
    assert generate(engine) == fresh_answers[1]


def test_weights_come_by_broadcast(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any
) -> None:
    with broadcast_group(engine) as send:
        success, message = send(list(wide_checkpoints[1].named_tensors()))
    assert success, message
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
    assert generate(engine) == fresh_answers[1]


def test_wrapped_names_reach_the_engine_through_its_own_push(
    session: Session, engine: Any, wide_checkpoints: Checkpoints
) -> None:
    pairs = [(f"module._orig_mod.{n}", t.clone()) for n, t in wide_checkpoints[1].named_tensors()]
    assert push(engine, pairs)[0]
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


# Nothing ends the engine.


def spoil(pairs: Any, fault: str) -> list[tuple[str, Tensor]]:
    tensors = {n: t.clone() for n, t in pairs}
    if fault == "nan":
        tensors[CULPRIT][-1, -1] = math.nan
    elif fault == "shape":
        tensors[CULPRIT] = tensors[CULPRIT][:-1]
    elif fault == "transposed":
        tensors[CULPRIT] = tensors[CULPRIT].t().contiguous()
    elif fault == "dtype":
        tensors[CULPRIT] = tensors[CULPRIT].to(torch.int8)
    elif fault == "scale":
        tensors[f"{CULPRIT}_scale"] = torch.ones(256, 1)
    elif fault == "unknown":
        tensors["model.layers.9.mlp.mystery.weight"] = torch.ones(2, 2)
    return list(tensors.items())


FAULTS = ["nan", "shape", "transposed", "dtype", "scale", "unknown"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_push_is_named_and_leaves_the_engine_alive(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any, fault: str
) -> None:
    [(_, before)] = session.engine.read_weights([CULPRIT])
    bad = spoil(wide_checkpoints[1].named_tensors(), fault)
    culprit = "mystery" if fault == "unknown" else CULPRIT
    success, message = push(engine, bad)
    assert not success
    assert culprit in message
    if fault in ("nan", "shape", "transposed", "dtype"):
        [(_, after)] = session.engine.read_weights([CULPRIT])
        assert torch.equal(before, after)
    session.update_weights(wide_checkpoints[0].named_tensors())
    assert generate(engine) == fresh_answers[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_direct_push_is_named_and_leaves_the_engine_alive(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any, fault: str
) -> None:
    o_proj = "model.layers.0.self_attn.o_proj.weight"
    [(_, before)] = session.engine.read_weights([o_proj])
    value = torch.randn(128, 128)
    bad = {
        "nan": (o_proj, value.masked_fill(value > 2, math.nan).masked_fill(value < -2, math.nan)),
        "shape": (o_proj, value[:127]),
        "transposed": (o_proj, value[:, :64]),
        "dtype": (o_proj, value.to(torch.int8)),
        "scale": (f"{o_proj}_scale", torch.ones(2, 1)),
        "unknown": (f"{o_proj}.mystery", value),
    }[fault]
    success, message = push(engine, [bad], load_format="direct")
    assert not success
    assert bad[0] in message
    [(_, after)] = session.engine.read_weights([o_proj])
    assert torch.equal(before, after)
    assert generate(engine) == fresh_answers[0]


@pytest.mark.parametrize("fault", ["no such folder", "another shape", "8-bit values"])
def test_a_bad_checkpoint_on_disk_leaves_the_engine_alive(
    session: Session,
    engine: Any,
    wide_checkpoints: Checkpoints,
    make_checkpoints: Any,
    tmp_path: Any,
    fault: str,
) -> None:
    path = tmp_path / "missing"
    if fault == "another shape":
        path = make_checkpoints("qwen2")[0].path
    elif fault == "8-bit values":
        from safetensors.torch import save_file

        path.mkdir()
        eight_bit = {
            n: (t.to(torch.int8) if t.ndim == 2 else t)
            for n, t in wide_checkpoints[1].named_tensors()
        }
        save_file(eight_bit, path / "model.safetensors")
        config = (wide_checkpoints[1].path / "config.json").read_text()
        (path / "config.json").write_text(config)
    success, _, *_ = engine.update_weights_from_disk(str(path))
    assert not success
    session.update_weights(wide_checkpoints[1].named_tensors())
    assert session.verify(wide_checkpoints[1].named_tensors()).ok


@pytest.mark.parametrize("payload", ["garbage", "unknown format"])
def test_a_bad_payload_leaves_the_engine_alive(
    session: Session, engine: Any, fresh_answers: Any, wide_checkpoints: Checkpoints, payload: str
) -> None:
    if payload == "garbage":
        success, _ = push(engine, [b"\x80\x04garbage"], load_format="flattened_bucket")
    else:
        pairs = list(wide_checkpoints[0].named_tensors())
        success, _ = push(engine, pairs, load_format="no_such_loader")
    assert not success
    assert generate(engine) == fresh_answers[0]


def test_after_memory_was_released_a_full_push_comes_first(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any
) -> None:
    """TRL#5312, #5313."""
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    with pytest.raises(ValueError, match="weights were released"):
        generate(engine)
    with pytest.raises(EngineStateError, match="weights were released"):
        session.engine.generate(PROMPTS, SamplingParams())
    pairs = list(wide_checkpoints[0].named_tensors())
    assert push(engine, pairs[1:])[0]
    with pytest.raises(ValueError, match="1 of 27 have not been pushed"):
        generate(engine)
    assert push(engine, pairs[:1])[0]
    assert generate(engine) == fresh_answers[0]


def test_the_kv_cache_alone_may_be_released(
    session: Session, engine: Any, fresh_answers: Any
) -> None:
    engine.release_memory_occupation(tags=["kv_cache"])
    engine.resume_memory_occupation(tags=["kv_cache"])
    assert generate(engine) == fresh_answers[0]


def test_every_address_stays(session: Session, engine: Any, wide_checkpoints: Checkpoints) -> None:
    """vllm#50521, #48438, #48539: graphs and handles stay right."""

    def addresses() -> dict[str, list[int]]:
        [places] = session.engine._call("weights")  # type: ignore[attr-defined]
        return {name: place["addresses"] for name, place in places.items()}

    before = addresses()
    session.update_weights(wide_checkpoints[1].named_tensors())
    push(engine, list(wide_checkpoints[1].named_tensors()))
    engine.update_weights_from_disk(str(wide_checkpoints[0].path))
    assert addresses() == before
    assert len(before) == len(session.engine.weights())


# What it is.


def test_attaching_with_another_scheme_is_refused(session: Session, engine: Any) -> None:
    with pytest.raises(EngineStateError, match="already, with int8"):
        flashrl.attach(engine, "fp8_channel")


def test_a_dead_engine_is_said_to_be_dead(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own calls would wait for an answer for ever."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    session = flashrl.attach(engine, "int8")
    monkeypatch.setattr(engine, "get_all_child_pids", lambda: [ended.pid])
    for call in (
        lambda: flashrl.attach(engine, "int8"),
        lambda: session.update_weights([]),
        lambda: session.engine.generate(PROMPTS, SamplingParams()),
        lambda: session.describe(),
    ):
        with pytest.raises(EngineStateError, match="shut down"):
            call()
    session.detach()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache": "fp8"}, "an fp8 KV cache"),
        ({"prune_dead_neurons": True}, "pruning of dead neurons"),
        ({"dynamic": False}, "static scales"),
    ],
)
def test_what_would_be_left_out_is_refused(
    engine: Any, changes: dict[str, Any], message: str
) -> None:
    scheme = get_scheme("int8").evolve(**changes)
    with pytest.raises(UnsupportedError, match=message):
        flashrl.attach(engine, scheme)
    with pytest.raises(UnsupportedError, match=message):
        flashrl.launch_args("sglang", scheme)


def test_a_partial_update_through_the_session_is_an_error(
    session: Session, wide_checkpoints: Checkpoints
) -> None:
    pairs = list(wide_checkpoints[0].named_tensors())
    with pytest.raises(WeightUpdateError) as caught:
        session.update_weights(pairs[1:])
    assert caught.value.missing == (pairs[0][0],)


# The log-probabilities are those of the distribution sampled.


@pytest.fixture(scope="module")
def hugging_face(wide_checkpoints: Checkpoints) -> tuple[Any, list[tuple[str, Tensor]]]:
    """The embedded engine, quantized alike, in bf16; and the weights that it holds.

    An eighth of A's: random weights of A's size amplify the rounding of bf16 past any tolerance
    (0.12 nats at a third, 0.02 at an eighth, between bf16 and fp32 of the same 8-bit model).
    """
    transformers = pytest.importorskip("transformers")
    calm = [(n, t / 8 if t.ndim == 2 else t) for n, t in wide_checkpoints[0].named_tensors()]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        wide_checkpoints[0].path, dtype=torch.bfloat16
    )
    flashrl.attach(model, "int8").update_weights(calm)
    return model, calm


@pytest.fixture
def calm_session(session: Session, hugging_face: tuple[Any, Any]) -> Session:
    """The engine, holding what the embedded engine holds."""
    session.update_weights(hugging_face[1])
    return session


def logits_of(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Logits before each token of a response, (response_length, vocab)."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt + response])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def responses_of(rollout: Any) -> list[tuple[list[int], Tensor]]:
    """Tokens and log-probabilities of each response, without padding."""
    return [
        (ids[mask.bool()].tolist(), log_probs[mask.bool()])
        for ids, mask, log_probs in zip(
            rollout.response_ids, rollout.response_mask, rollout.rollout_log_probs, strict=True
        )
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probs_agree_with_hugging_face(
    calm_session: Session, hugging_face: Any, temperature: float
) -> None:
    """TRL#4159 and its kin: tempered once, and by division of the logits."""
    rollout = calm_session.generate(PROMPTS, SamplingParams(temperature=temperature, max_tokens=24))
    for prompt, (response, log_probs) in zip(PROMPTS, responses_of(rollout), strict=True):
        logits = logits_of(hugging_face[0], prompt, response) / (temperature or 1.0)
        expected = logits.log_softmax(-1)[torch.arange(len(response)), response]
        torch.testing.assert_close(log_probs, expected, atol=0.02, rtol=0)


def test_penalties_and_bias_are_part_of_the_distribution(
    calm_session: Session, hugging_face: Any
) -> None:
    """The original's patched sampler ignored them.

    With its overlapped schedule SGLang counts a token one step late, and the prompt's last token
    in its place; what it reports is the distribution that it really sampled.
    """
    params = SamplingParams(
        max_tokens=24,
        temperature=0.9,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={7: 3.0, 300: -2.0},
    )

    def penalized(row: Tensor, seen: list[int], token: int) -> float:
        row = row.clone()
        row[7] += 3.0
        row[300] -= 2.0
        for known in set(seen):
            row[known] -= 0.7 + 0.4 * seen.count(known)
        return (row / 0.9).log_softmax(-1)[token].item()

    rollout = calm_session.generate(PROMPTS, params)
    for prompt, (response, log_probs) in zip(PROMPTS, responses_of(rollout), strict=True):
        logits = logits_of(hugging_face[0], prompt, response)
        for position, token in enumerate(response):
            late = [*prompt[-1:], *response[: position - 1]] if position else []
            expected = [
                penalized(logits[position], seen, token) for seen in (response[:position], late)
            ]
            assert min(abs(log_probs[position].item() - e) for e in expected) < 0.03


@pytest.mark.parametrize(
    "cut", [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.4}, {"top_k": 8, "top_p": 0.8}]
)
def test_truncated_log_probs_are_renormalised(
    calm_session: Session, hugging_face: Any, cut: dict[str, Any]
) -> None:
    """Exact, or refused with a reason."""
    params = SamplingParams(max_tokens=16, temperature=1.3, **cut)
    if not set(cut) <= calm_session.capabilities.exact_log_probs:
        with pytest.raises(UnsupportedError, match="does not report exact log-probabilities"):
            calm_session.generate(PROMPTS, params)
        return
    rollout = calm_session.generate(PROMPTS, params)
    assert rollout.log_mass is not None
    assert (rollout.log_mass < 0).float().mean() > 0.9
    for row, (prompt, (response, log_probs)) in enumerate(
        zip(PROMPTS, responses_of(rollout), strict=True)
    ):
        probs = (logits_of(hugging_face[0], prompt, response) / 1.3).softmax(-1)
        ordered = probs.sort(descending=True).values
        kept = torch.arange(ordered.shape[1]) < cut.get("top_k", ordered.shape[1])
        kept = kept & (ordered.cumsum(1) - ordered <= cut.get("top_p", 1.0))
        kept &= ordered >= cut.get("min_p", 0.0) * ordered[:, :1]
        log_mass = (ordered * kept).sum(1).log()
        sampled = probs[torch.arange(len(response)), response].log()
        torch.testing.assert_close(log_probs, sampled - log_mass, atol=0.05, rtol=0)
        torch.testing.assert_close(
            rollout.log_mass[row, : len(response)], log_mass, atol=0.05, rtol=0
        )
