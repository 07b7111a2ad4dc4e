"""Weights in 8 bit on their way: half the bytes, and the reference's bits at the other end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashrl.core.quantize import quantize_into
from flashrl.core.schemes import get_scheme
from flashrl.trainers import guards
from flashrl.trainers.openrlhf.transfer import pack, receiving, sending, unpack

SCHEMES = ("int8", "fp8_channel", "fp8_tensor", "fp8_block")


class Trainer:
    """As much of OpenRLHF's ActorPPOTrainer as a broadcast looks at."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.actor = SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=False)
        vllm = SimpleNamespace(tensor_parallel_size=options.pop("tensor_parallel_size", 1))
        ds = SimpleNamespace(tensor_parallel_size=1, zero_stage=options.pop("zero_stage", 2))
        self.args = SimpleNamespace(vllm=vllm, ds=ds)
        self.use_cuda_ipc = options.pop("use_cuda_ipc", False)
        self.sent: list[tuple[str, torch.dtype, Any, Tensor]] = []

    def broadcast_to_vllm(self) -> None:
        for name, parameter in list(self.actor.model.module.named_parameters()):
            self.sent.append((name, parameter.dtype, parameter.shape, parameter.data.clone()))


class Worker:
    """As much of vLLM's worker as OpenRLHF's part of it looks at."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.model_runner = SimpleNamespace(model=self)

    def load_weights(self, weights: Any) -> None:
        self.loaded |= dict(weights)

    def update_weight(self, name: str, weight: Tensor) -> None:
        self.model_runner.model.load_weights(weights=[(name, weight)])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"up_proj": nn.Linear(130, 257), "norm": nn.LayerNorm(130)})
    return model.to(torch.bfloat16)


@pytest.fixture(autouse=True)
def _eight_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_warned", set())
    monkeypatch.setenv("FLASHRL_CONFIG", "int8")
    monkeypatch.setenv("FLASHRL_QUANTIZED_SYNC", "1")


@pytest.mark.parametrize("name", SCHEMES)
def test_what_arrives_is_the_reference(
    model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHRL_CONFIG", name)
    trainer, worker, scheme = Trainer(model), Worker(), get_scheme(name)
    sending(Trainer.broadcast_to_vllm)(trainer)
    for sent, dtype, shape, data in trainer.sent:
        # OpenRLHF announces a dtype, which must be the engine's, and a shape.
        assert (data.dtype, data.shape) == (dtype, shape) == (torch.bfloat16, data.shape)
        receiving(Worker.update_weight)(worker, sent, data)
    weight = model.get_parameter("up_proj.weight")
    values = torch.empty(weight.shape, dtype=scheme.dtype)
    scale = torch.empty(scheme.scale_shape(weight.shape))
    quantize_into(weight.detach(), values, scale, scheme=scheme)
    arrived = worker.loaded
    assert torch.equal(arrived["up_proj.weight"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(arrived["up_proj.weight_scale"], scale)
    for kept in ("up_proj.bias", "norm.weight", "norm.bias"):
        assert torch.equal(arrived[kept], model.get_parameter(kept))
    assert len(arrived) == 5
    lengths = {sent: data.nbytes for sent, _, _, data in trainer.sent}
    (packed,) = (sent for sent in lengths if sent.endswith("up_proj.weight"))
    assert lengths[packed] < 0.52 * weight.nbytes
    assert trainer.actor.model.module is model


def test_a_weight_that_is_not_finite_arrives_as_one_that_the_engine_refuses() -> None:
    scheme = get_scheme("int8")
    weight = torch.full((2, 3), float("nan"), dtype=torch.bfloat16)
    packed = pack("up_proj.weight", weight, scheme)
    loaded = dict(unpack("flashrl-packed:2x3:up_proj.weight", packed, scheme))
    assert loaded["up_proj.weight_scale"].isnan().all()


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"zero_stage": 3}, {"use_cuda_ipc": True}]
)
def test_what_cannot_be_quantized_ahead_goes_in_16_bit(
    model: nn.Module, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(model, **options)
    sending(Trainer.broadcast_to_vllm)(trainer)
    assert [name for name, *_ in trainer.sent] == [name for name, _ in model.named_parameters()]
    assert "weights are sent in 16 bit" in caplog.text


@pytest.mark.parametrize("variable", ["FLASHRL_CONFIG", "FLASHRL_QUANTIZED_SYNC"])
def test_nothing_changes_unless_both_variables_ask(
    model: nn.Module, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable)
    trainer = Trainer(model)
    sending(Trainer.broadcast_to_vllm)(trainer)
    assert all(torch.equal(data, model.get_parameter(name)) for name, *_, data in trainer.sent)
