"""Nothing that is pushed ends the engine, and nothing wrong stays in it unseen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashrl.core.rollouts import SamplingParams
from flashrl.errors import EngineStateError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .ways import GREEDY, PROMPTS, generate, load_from_disk, push

Checkpoints = tuple[Checkpoint, Checkpoint]

CULPRIT = "model.layers.0.mlp.gate_proj.weight"


def spoil(pairs: Any, fault: str) -> list[tuple[str, Tensor]]:
    tensors = {n: t.clone() for n, t in pairs}
    if fault == "nan":
        tensors[CULPRIT][-1, -1] = math.nan
    elif fault == "shape":
        tensors[CULPRIT] = tensors[CULPRIT][:-1]
    elif fault == "transposed":
        tensors[CULPRIT] = tensors[CULPRIT].t().contiguous()
    elif fault == "dtype":
        tensors[CULPRIT] = tensors[CULPRIT].long()
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
        "dtype": (o_proj, value.long()),
        "scale": (f"{o_proj}_scale", torch.ones(128, 1)),
        "unknown": (f"{o_proj}.mystery", value),
    }[fault]
    success, message = push(engine, [bad], load_format="direct")
    assert not success
    assert bad[0] in message
    [(_, after)] = session.engine.read_weights([o_proj])
    assert torch.equal(before, after)
    assert generate(engine) == fresh_answers[0]


def save_as(folder: Path, like: Checkpoint, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint folder with other tensors."""
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((like.path / "config.json").read_text())
    return folder


@pytest.mark.parametrize("fault", ["no such folder", "another shape", "8-bit values", "lacks one"])
def test_a_bad_checkpoint_on_disk_leaves_the_engine_alive(
    session: Session,
    engine: Any,
    wide_checkpoints: Checkpoints,
    fresh_answers: Any,
    make_checkpoints: Any,
    tmp_path: Path,
    fault: str,
) -> None:
    path = tmp_path / fault.replace(" ", "_")
    tensors = dict(wide_checkpoints[1].named_tensors())
    if fault == "another shape":
        path = make_checkpoints("qwen2")[0].path
    elif fault == "8-bit values":
        eight_bit = {n: t.to(torch.int8) if t.ndim == 2 else t for n, t in tensors.items()}
        save_as(path, wide_checkpoints[1], eight_bit)
    elif fault == "lacks one":
        del tensors[CULPRIT]
        save_as(path, wide_checkpoints[1], tensors)
    success, message = load_from_disk(engine, path)
    assert not success
    if fault == "lacks one":
        assert CULPRIT in message
        with pytest.raises(ValueError, match="1 of 27 weights are missing"):
            generate(engine)
    session.update_weights(wide_checkpoints[1].named_tensors())
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
    assert generate(engine) == fresh_answers[1]


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
    with pytest.raises(ValueError, match=r"27 of 27 weights are missing .*were released"):
        generate(engine)
    with pytest.raises(EngineStateError, match=r"27 of 27 weights are missing .*were released"):
        session.engine.generate(PROMPTS, SamplingParams())
    pairs = list(wide_checkpoints[0].named_tensors())
    assert push(engine, pairs[1:])[0]
    with pytest.raises(ValueError, match=r"1 of 27 weights are missing"):
        generate(engine)
    assert push(engine, pairs[:1])[0]
    assert generate(engine) == fresh_answers[0]


def test_the_kv_cache_alone_may_be_released(
    session: Session, engine: Any, fresh_answers: Any
) -> None:
    engine.release_memory_occupation(tags=["kv_cache"])
    engine.resume_memory_occupation(tags=["kv_cache"])
    assert generate(engine) == fresh_answers[0]


def test_weights_do_not_change_while_the_engine_generates(
    session: Session, engine: Any, wide_checkpoints: Checkpoints, fresh_answers: Any
) -> None:
    [(_, before)] = session.engine.read_weights([CULPRIT])
    long = {**GREEDY, "max_new_tokens": 6000, "ignore_eos": True}
    stream = engine.generate(input_ids=PROMPTS[0], sampling_params=long, stream=True)
    next(stream)
    with pytest.raises(EngineStateError, match="the engine is generating"):
        session.update_weights(wide_checkpoints[1].named_tensors())
    assert session.version is None
    engine.tokenizer_manager.abort_request(abort_all=True)
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    [(_, after)] = session.engine.read_weights([CULPRIT])
    assert torch.equal(before, after)
    session.update_weights(wide_checkpoints[1].named_tensors())
    assert generate(engine) == fresh_answers[1]


def test_what_cannot_be_merged_is_named_and_the_rest_is_loaded(
    session: Session, engine: Any, wide_checkpoints: Checkpoints
) -> None:
    """LoRA factors reach SGLang's own push, where nobody says by how much to scale them."""
    pairs = [(name, tensor.clone()) for name, tensor in wide_checkpoints[1].named_tensors()]
    factor = f"base_model.model.{CULPRIT.removesuffix('.weight')}.lora_A.default.weight"
    success, message = push(engine, [(factor, torch.ones(4, 128)), *pairs])
    assert not success
    assert f"{factor}: a LoRA factor" in message
    assert session.verify(wide_checkpoints[1].named_tensors()).ok
