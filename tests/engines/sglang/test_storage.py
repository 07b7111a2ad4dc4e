"""The parameter that loads 16 bit: by itself, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashrl.core.schemes import PRESETS, get_scheme
from flashrl.engines.sglang.storage import QuantizedParameter, QuantizedStorage
from flashrl.errors import FlashRLError, NonFiniteError, SchemeError, ShapeError, WeightUpdateError


def make(scheme: str, parts: list[int], columns: int, experts: int | None = None) -> Any:
    home = QuantizedStorage.allocate("layer", get_scheme(scheme), parts, columns)
    shape = None if experts is None else (experts, sum(parts) // experts, columns)
    return QuantizedParameter(home, shape)


def round_trip(weight: Tensor, scheme: str) -> Tensor:
    """By hand, in float64 where it does not round: what 8 bit leaves of a weight."""
    qmax = 127.0 if scheme == "int8" else 448.0
    weight = weight.float()
    if scheme == "fp8_block":
        tiles = weight.view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
        scale = (tiles.abs().amax((1, 3)) / qmax).repeat_interleave(128, 0)
        scale = scale.repeat_interleave(128, 1)
    elif scheme == "fp8_tensor":
        scale = weight.abs().max() / qmax
    else:
        scale = weight.abs().amax(1, keepdim=True) / qmax
    values = weight / scale
    if scheme == "int8":
        return values.round() * scale
    return values.clamp(-qmax, qmax).to(torch.float8_e4m3fn).float() * scale


SCHEMES = [name for name, scheme in PRESETS.items() if scheme.quantized]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_part_has_its_own_scale(scheme: str, dtype: torch.dtype) -> None:
    """vllm#47515: gate 1x, up 2.14x, each half dequantizes by its own scale."""
    gate = torch.randn(128, 256).to(dtype)
    up = (2.14 * torch.randn(128, 256)).to(dtype)
    weight = make(scheme, [128, 128], 256)
    weight.data.narrow(0, 128, 128).copy_(up)
    weight.data.narrow(0, 0, 128).copy_(gate)
    assert torch.equal(weight.home.read(slice(0, 128)), round_trip(gate, scheme))
    assert torch.equal(weight.home.read(slice(128, 256)), round_trip(up, scheme))


def test_a_copy_of_several_parts_equals_copies_of_each() -> None:
    whole = torch.randn(12, 8)
    at_once, apart = make("fp8_tensor", [4, 2, 6], 8), make("fp8_tensor", [4, 2, 6], 8)
    at_once.data.copy_(whole)
    for start, size in ((6, 6), (0, 4), (4, 2)):
        apart.data.narrow(0, start, size).copy_(whole.narrow(0, start, size))
    assert torch.equal(at_once.home.weight.float(), apart.home.weight.float())
    assert torch.equal(at_once.home.scale, apart.home.scale)


@given(st.sampled_from([(0, 0), (1, 4), (2, 0), (2, 4)]), st.booleans())
def test_any_chain_of_views_loads_the_same_rows(place: tuple[int, int], indexed: bool) -> None:
    expert, row = place
    weight = make("int8", [4, 4] * 3, 8, experts=3)
    source = torch.randn(4, 8)
    view = weight.data[expert] if indexed else weight.data.narrow(0, expert, 1).squeeze(0)
    view = view.narrow(0, row, 4) if indexed else view[row : row + 4].view(4, 8)
    view.copy_(source)
    start = expert * 8 + row
    assert torch.equal(weight.home.read(slice(start, start + 4)), round_trip(source, "int8"))
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[start : start + 4] = False
    assert not weight.home.weight[untouched].any()


def test_a_square_matrix_is_quantized_and_not_cast() -> None:
    """A cast to int8 would leave only zeros of weights below 1, and say nothing."""
    weight, source = make("int8", [16], 16), 0.1 * torch.randn(16, 16, dtype=torch.bfloat16)
    weight.data.copy_(source)
    assert torch.equal(weight.home.read(slice(0, 16)), round_trip(source, "int8"))
    assert weight.home.weight.abs().amax() == 127


def test_the_parameter_itself_loads_too() -> None:
    weight, source = make("int8", [4], 8), torch.randn(4, 8)
    weight.copy_(source)
    assert torch.equal(weight.home.read(slice(0, 4)), round_trip(source, "int8"))


def test_transposed_and_strided_sources_equal_contiguous_ones() -> None:
    source = torch.randn(8, 4).t()
    straight, slanted = make("int8", [4], 8), make("int8", [4], 8)
    straight.data.copy_(source.contiguous())
    slanted.data.copy_(source)
    assert torch.equal(straight.home.weight, slanted.home.weight)


def test_memory_is_zero_and_scales_one_before_anything_is_loaded() -> None:
    """vllm#45835, vllm#41670: never uninitialised."""
    weight = make("fp8_channel", [4], 8)
    assert not weight.home.read(slice(0, 4)).any()
    assert bool((weight.home.scale == 1).all())


def test_addresses_stay() -> None:
    """vllm#50521, #48438."""
    weight = make("int8", [4], 8)
    before = weight.data_ptr(), weight.home.scale.data_ptr()
    for _ in range(3):
        weight.data.copy_(torch.randn(4, 8))
    assert (weight.data_ptr(), weight.home.scale.data_ptr()) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_and_nothing_is_written(value: float) -> None:
    weight = make("int8", [4, 4], 8)
    weight.data.copy_(torch.randn(8, 8))
    before = weight.home.read(slice(0, 8))
    bad = torch.randn(4, 8)
    bad[3, 7] = value
    with pytest.raises(NonFiniteError, match=r"layer\.weight rows 4 to 7"):
        weight.data.narrow(0, 4, 4).copy_(bad)
    assert torch.equal(weight.home.read(slice(0, 8)), before)


def test_a_refusal_is_reported_where_somebody_listens() -> None:
    weight, told = make("int8", [4], 8), []
    weight.home.report = lambda row, error: told.append((row, type(error)))
    weight.data.copy_(torch.full((4, 8), float("nan")))
    assert told == [(0, NonFiniteError)]


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 2), (0, 8)), ((2, 4), (0, 8)), ((0, 4), (0, 4)), ((0, 4), (4, 4))]
)
def test_half_a_part_is_refused(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    weight = make("int8", [4, 4], 8)
    view = weight.data.narrow(0, *rows).narrow(1, *columns)
    with pytest.raises(ShapeError, match="nothing was written"):
        view.copy_(torch.randn(view.shape))
    assert not weight.home.weight.any()


def test_a_source_of_another_shape_is_not_broadcast() -> None:
    weight = make("int8", [4], 8)
    with pytest.raises(ShapeError, match="nothing was written"):
        weight.data.copy_(torch.randn(1, 8))


def test_integers_are_refused() -> None:
    with pytest.raises(FlashRLError):
        make("fp8_channel", [4], 8).data.copy_(torch.ones(4, 8, dtype=torch.int64))


def test_a_checkpoint_that_lacks_a_part_is_noticed() -> None:
    weight = make("int8", [4, 2], 8)
    weight.home.check_complete()  # nothing came yet: an engine may start without weights
    weight.data.narrow(0, 0, 4).copy_(torch.randn(4, 8))
    with pytest.raises(WeightUpdateError, match=r"1 of its 2 parts.*row 4"):
        weight.home.check_complete()
    weight.data.narrow(0, 4, 2).copy_(torch.randn(2, 8))
    weight.home.check_complete()


def test_what_a_sender_quantized_is_taken_as_it_is() -> None:
    """-128 is never made here, and accepted."""
    weight = make("int8", [4, 2], 8)
    values = torch.randint(-128, 128, (2, 8)).to(torch.int8)
    values[0, 0] = -128
    scale = torch.tensor([[0.5], [2.0]])
    weight.home.take(values, scale, row=4)
    assert torch.equal(weight.home.read(slice(4, 6)), values.float() * scale)
    assert not weight.home.weight[:4].any()
    weight.home.take(values, torch.full((1, 1), 3.0), row=4)
    assert torch.equal(weight.home.read(slice(4, 6)), values.float() * 3.0)


def test_what_was_expected_and_never_came_is_known() -> None:
    weight = make("int8", [4, 2], 8)
    weight.data.copy_(torch.randn(6, 8))
    weight.home.expect(4)
    assert weight.home.has(0)
    assert not weight.home.has(4)
    weight.data.narrow(0, 4, 2).copy_(torch.randn(2, 8))
    assert weight.home.has(4)


def test_blocks_must_not_span_parts() -> None:
    with pytest.raises(SchemeError, match=r"layer: parts of \[64, 128\] rows"):
        make("fp8_block", [128, 64], 128)


def test_the_original_comes_back_until_an_update_replaces_it() -> None:
    original = torch.nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16), requires_grad=False)
    original.output_dim = 0  # type: ignore[attr-defined]
    weight = make("int8", [4], 8)
    weight.data.copy_(original)
    weight.home.original = original
    assert weight.home.restore() is original
    new = torch.randn(4, 8)
    weight.data.copy_(new)
    restored = weight.home.restore()
    assert torch.equal(restored, round_trip(new, "int8").bfloat16())
    assert restored.output_dim == 0  # type: ignore[attr-defined]


def test_ordinary_operations_give_ordinary_tensors() -> None:
    weight = make("int8", [4], 8)
    assert type(weight + 1) is Tensor
    assert type(weight.float()) is Tensor
    assert weight.data.shape == (4, 8)
    assert not weight.requires_grad
    assert [type(p) for p in torch.nn.ParameterList([weight]).parameters()] == [QuantizedParameter]
