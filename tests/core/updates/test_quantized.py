"""Weights quantized before they travel: the same bits as quantized at their goal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashrl.core.schemes import get_scheme
from flashrl.core.updates.quantized import quantize_tensors

LINEAR = "model.layers.0.mlp.up_proj.weight"


def by_hand(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Rows one by one, in float64 where that changes nothing and float32 where it would."""
    qmax, dtype = {"int8": (127.0, torch.int8)}.get(scheme, (448.0, torch.float8_e4m3fn))
    rows = weight.float()
    shared = rows.abs().max() if scheme == "fp8_tensor" else None
    values, scales = [], []
    for row in rows:
        amax = row.abs().max() if shared is None else shared
        scale = amax / torch.tensor(qmax) if amax > 0 else torch.tensor(1.0)
        scaled = (row / scale).clamp(-qmax, qmax)
        values.append((scaled.round() if dtype is torch.int8 else scaled).to(dtype))
        scales.append(scale)
    scale = torch.stack(scales)[:, None] if shared is None else scales[0].view(1)
    return torch.stack([v.view(torch.uint8) for v in values]), scale


@pytest.mark.parametrize("scheme", ["int8", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear_weight_travels_as_values_and_scale(scheme: str, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 48).to(dtype)
    weight[2] = 0
    (name, values), (scale_name, scale) = quantize_tensors([(LINEAR, weight)], scheme)
    expected_values, expected_scale = by_hand(weight, scheme)
    assert (name, scale_name) == (LINEAR, f"{LINEAR}_scale")
    assert values.dtype == get_scheme(scheme).dtype
    assert torch.equal(values.view(torch.uint8), expected_values)
    assert scale.shape == ((5, 1) if scheme != "fp8_tensor" else (1,))
    assert scale.dtype == torch.float32
    assert torch.equal(scale, expected_scale)


def test_half_the_bytes_of_bf16() -> None:
    weight = torch.randn(256, 512, dtype=torch.bfloat16)
    sent = sum(tensor.nbytes for _, tensor in quantize_tensors([(LINEAR, weight)], "int8"))
    assert sent == weight.nbytes / 2 + 4 * 256


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ],
)
def test_what_the_engine_keeps_travels_as_it_is(name: str) -> None:
    weight = torch.randn(4, 8)
    ((got, tensor),) = quantize_tensors([(name, weight)], "int8")
    assert got == name
    assert tensor is weight


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.norm.weight", torch.ones(4)),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(4)),
        (LINEAR, torch.ones(2, 2, dtype=torch.int8)),
        ("model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 4, 4)),
    ],
)
def test_what_is_no_matrix_of_floats_travels_as_it_is(name: str, tensor: Tensor) -> None:
    ((got, same),) = quantize_tensors([(name, tensor)], "int8")
    assert got == name
    assert same is tensor


@pytest.mark.parametrize("scheme", ["bf16", get_scheme("int8").evolve(dynamic=False)])
def test_nothing_is_quantized_without_dynamic_scales(scheme: str) -> None:
    weight = torch.randn(4, 8)
    ((_, tensor),) = quantize_tensors([(LINEAR, weight)], scheme)
    assert tensor is weight


def test_blocks_have_a_scale_each() -> None:
    weight = torch.zeros(200, 130)
    weight[150, 129] = 448.0
    (_, values), (_, scale) = quantize_tensors([(LINEAR, weight)], "fp8_block")
    assert scale.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert values[150, 129].float() == 448.0


def test_the_schemes_ignore_list_counts_and_names_may_be_wrapped() -> None:
    scheme = get_scheme("int8").evolve(ignore=("re:.*down_proj",))
    tensors = {
        "module.model.layers.0.mlp.down_proj.weight": torch.ones(2, 2),
        "module._orig_mod.model.layers.0.mlp.up_proj.weight": torch.ones(2, 2),
    }
    names = [name for name, _ in quantize_tensors(tensors.items(), scheme)]
    down, up = tensors
    assert names == [down, up, f"{up}_scale"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_left_for_the_engine_to_refuse(bad: float) -> None:
    weight = torch.ones(2, 2)
    weight[1, 0] = bad
    ((name, tensor),) = quantize_tensors([(LINEAR, weight)], "int8")
    assert name == LINEAR
    assert tensor is weight


def test_one_tensor_at_a_time_and_the_senders_buffer_may_be_reused() -> None:
    buffer = torch.empty(2, 4)

    def sender():
        for value in (1.0, 2.0):
            yield f"model.layers.{int(value)}.mlp.up_proj.weight", buffer.fill_(value)

    got = dict(quantize_tensors(sender(), "int8"))
    scales = [got[f"model.layers.{n}.mlp.up_proj.weight_scale"][0, 0].item() for n in (1, 2)]
    assert scales == pytest.approx([1 / 127, 2 / 127])
