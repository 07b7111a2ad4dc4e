"""The reference arithmetic, against NumPy-style float64 loops and hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from flashrl.core.quantize import clipped_fraction, compute_scale, dequantize, quantize_into
from flashrl.core.schemes import PRESETS, QuantScheme, get_scheme
from flashrl.errors import NonFiniteError, SchemeError, ShapeError

QUANTIZED = [name for name, scheme in PRESETS.items() if scheme.quantized]
BLOCK = get_scheme("fp8_block")
INT8_BLOCK = BLOCK.evolve(name="int8_block", type="int", block_structure=(16, 8))


def round_trip(
    weight: torch.Tensor, scheme: str | QuantScheme, **kwargs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scheme = get_scheme(scheme)
    out = torch.empty(weight.shape, dtype=scheme.dtype)
    scale = torch.empty(scheme.scale_shape(weight.shape))
    quantize_into(weight, out, scale, scheme=scheme, **kwargs)
    return out, scale, dequantize(out, scale, scheme=scheme)


def naive_scale(weight: torch.Tensor, scheme: QuantScheme, i: int, j: int) -> float:
    """Scale of element (i, j): a plain loop over the elements that share it, in float64."""
    if scheme.strategy == "tensor":
        group = weight
    elif scheme.block_structure is None:
        group = weight[i : i + 1]
    else:
        r, c = scheme.block_structure
        group = weight[i // r * r : i // r * r + r, j // c * c : j // c * c + c]
    amax = max(abs(value) for row in group.double().tolist() for value in row)
    return amax / scheme.qmax if amax else 1.0


@pytest.mark.parametrize("scheme", [*map(get_scheme, QUANTIZED), INT8_BLOCK], ids=lambda s: s.name)
def test_every_element_is_within_half_a_step_of_a_naive_loop(scheme: QuantScheme) -> None:
    weight = torch.randn(20, 23) * torch.logspace(-3, 3, 20)[:, None]
    _, _, dequantized = round_trip(weight, scheme)
    for i in range(20):
        for j in range(23):
            scale = naive_scale(weight, scheme, i, j)
            value, got = weight[i, j].item(), dequantized[i, j].item()
            # int8 steps are one scale wide; e4m3 has 3 mantissa bits, and 2**-9 below 2**-6.
            step = scale if scheme.type == "int" else max(abs(value) / 8, scale * 2**-9)
            assert abs(got - value) <= step / 2 * (1 + 1e-5)


def test_block_scales_follow_ragged_edges() -> None:
    weight = torch.arange(300 * 200, dtype=torch.float32).reshape(300, 200) + 1
    scale = compute_scale(weight, "fp8_block")
    assert scale.shape == (3, 2)
    for r in range(3):
        for c in range(2):
            block = weight[128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
            assert scale[r, c].item() == pytest.approx(block[-1, -1].item() / 448, rel=1e-6)


def test_a_lone_one_among_zeros_gives_no_nan() -> None:
    """slime#2256, torchao#4713, lmdeploy#3652: zero blocks must not divide by zero."""
    weight = torch.zeros(256, 256)
    weight[200, 3] = 1.0
    _, scale, dequantized = round_trip(weight, "fp8_block")
    assert bool((scale > 0).all())
    assert torch.equal(dequantized, weight)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_zeros_round_trip_to_zeros(scheme: str) -> None:
    """torch-spyre#3037."""
    out, scale, dequantized = round_trip(torch.zeros(5, 7), scheme)
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(dequantized, torch.zeros(5, 7))
    assert not out.float().any()


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38])
def test_a_scale_that_would_underflow_stays_positive(tiny: float) -> None:
    _, scale, dequantized = round_trip(torch.tensor([[tiny, -tiny]]), "int8")
    assert bool((scale > 0).all())
    assert torch.isfinite(dequantized).all()


def test_gate_and_up_keep_their_own_scales() -> None:
    """vllm#47515: each half of a fused weight dequantizes by its own scale."""
    gate = torch.randn(8, 16)
    up = 2.14 * gate
    fused_scale = torch.empty(16, 1)
    fused = torch.empty(16, 16, dtype=torch.float8_e4m3fn)
    scheme = get_scheme("fp8_tensor")
    quantize_into(gate, fused[:8], fused_scale[:8], scheme=scheme)
    quantize_into(up, fused[8:], fused_scale[8:], scheme=scheme)
    dequantized = fused.float() * fused_scale
    assert fused_scale[8].item() == pytest.approx(2.14 * fused_scale[0].item(), rel=1e-5)
    assert torch.allclose(dequantized[:8], gate, rtol=1 / 16, atol=1e-3)
    assert torch.allclose(dequantized[8:], up, rtol=1 / 16, atol=1e-3)


def test_four_times_the_weight_gives_four_times_the_dequantized_weight() -> None:
    """Flash-RL#30: the scale must follow the weight."""
    weight = torch.randn(6, 32)
    scheme = get_scheme("int8")
    out, scale = torch.empty(6, 32, dtype=torch.int8), torch.empty(6, 1)
    quantize_into(weight, out, scale, scheme=scheme)
    first = dequantize(out, scale, scheme=scheme)
    quantize_into(4 * weight, out, scale, scheme=scheme)
    assert torch.allclose(dequantize(out, scale, scheme=scheme), 4 * first, rtol=1e-6)


def test_static_scale_saturates_and_dynamic_does_not() -> None:
    """A static scale of 0.01 ends at 1.27; a drifted weight of 1.6 is clipped, and counted."""
    weight, scale = torch.tensor([[1.6, 0.5]]), torch.full((1, 1), 0.01)
    static = get_scheme("int8").evolve(dynamic=False)
    out = torch.empty(1, 2, dtype=torch.int8)
    quantize_into(weight, out, scale, scheme=static)
    assert scale.item() == pytest.approx(0.01)
    assert dequantize(out, scale, scheme=static)[0, 0].item() == pytest.approx(1.27)
    assert clipped_fraction(weight, scale, scheme=static) == 0.5
    _, fresh, dequantized = round_trip(weight, "int8")
    assert abs(dequantized[0, 0].item() - 1.6) <= fresh.item() / 2
    assert clipped_fraction(weight, fresh, scheme="int8") == 0.0


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "sliced"])
def test_layout_does_not_matter(scheme: str, layout: str) -> None:
    base = torch.randn(40, 40)
    weight = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(17, 40),
        "sliced": base[3:20, 5:29],
    }[layout]
    assert not weight.is_contiguous()
    for got, expected in zip(
        round_trip(weight, scheme), round_trip(weight.contiguous(), scheme), strict=True
    ):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_destination_may_be_a_view(scheme: str) -> None:
    weight = torch.randn(8, 12)
    storage = torch.zeros(12, 20, dtype=torch.float32).to(get_scheme(scheme).dtype)
    scale = torch.empty(get_scheme(scheme).scale_shape(weight.shape))
    quantize_into(weight, storage[2:10, 4:16], scale, scheme=scheme)
    expected, _, _ = round_trip(weight, scheme)
    assert torch.equal(storage[2:10, 4:16].float(), expected.float())
    assert not storage[:2].float().any()
    assert not storage[:, :4].float().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_input_dtypes_agree(scheme: str, dtype: torch.dtype) -> None:
    weight = torch.randn(9, 33).to(dtype)
    for got, expected in zip(
        round_trip(weight, scheme), round_trip(weight.float(), scheme), strict=True
    ):
        assert torch.equal(got.float(), expected.float())


def test_int8_never_emits_minus_128_and_accepts_it() -> None:
    out, _, _ = round_trip(torch.tensor([[-1.0, 1.0, -0.999]]), "int8")
    assert out.tolist() == [[-127, 127, -127]]
    loaded = torch.tensor([[-128]], dtype=torch.int8)
    assert dequantize(loaded, torch.full((1, 1), 0.5), scheme="int8").item() == -64.0


def test_fp8_saturates_instead_of_overflowing() -> None:
    static = get_scheme("fp8_channel").evolve(dynamic=False)
    out, scale = torch.empty(1, 3, dtype=torch.float8_e4m3fn), torch.ones(1, 1)
    quantize_into(torch.tensor([[1e6, -460.0, 1.0]]), out, scale, scheme=static)
    assert out.float().tolist() == [[448.0, -448.0, 1.0]]


def test_smoothing_multiplies_input_channels_first() -> None:
    weight, factors = torch.randn(4, 6), torch.rand(6) + 0.5
    for got, expected in zip(
        round_trip(weight, "int8", smoothing=factors),
        round_trip(weight * factors, "int8"),
        strict=True,
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", [*QUANTIZED, "static"])
def test_non_finite_weights_are_named_and_nothing_is_written(scheme: str, bad: float) -> None:
    chosen = get_scheme("int8").evolve(dynamic=False) if scheme == "static" else get_scheme(scheme)
    weight = torch.randn(150, 140)
    weight[149, 139] = bad
    out = torch.ones(weight.shape).to(chosen.dtype)
    scale = torch.full(chosen.scale_shape(weight.shape), 3.0)
    with pytest.raises(NonFiniteError, match=r"layers\.3\.up_proj"):
        quantize_into(weight, out, scale, scheme=chosen, name="layers.3.up_proj")
    assert bool((out.float() == 1).all())
    assert bool((scale == 3).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_a_flag_takes_the_place_of_the_error(bad: float) -> None:
    weight = torch.randn(3, 4)
    weight[1, 2] = bad
    flag = torch.zeros(1, dtype=torch.int32)
    out, scale = torch.empty(3, 4, dtype=torch.int8), torch.empty(3, 1)
    quantize_into(weight, out, scale, scheme="int8", flag=flag)
    assert flag.item() == (0 if math.isfinite(bad) else 1)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bad_static_scale_is_refused(bad: float) -> None:
    static = get_scheme("int8").evolve(dynamic=False)
    out = torch.zeros(1, 2, dtype=torch.int8)
    with pytest.raises(NonFiniteError, match="static scale"):
        quantize_into(torch.ones(1, 2), out, torch.full((1, 1), bad), scheme=static)
    assert not out.any()


@pytest.mark.parametrize(
    ("weight", "out", "scale"),
    [
        (torch.ones(2, 3, dtype=torch.int64), torch.empty(2, 3, dtype=torch.int8), (2, 1)),
        (torch.ones(6), torch.empty(6, dtype=torch.int8), (6, 1)),
        (torch.ones(2, 3), torch.empty(3, 2, dtype=torch.int8), (2, 1)),
        (torch.ones(2, 3), torch.empty(2, 3, dtype=torch.uint8), (2, 1)),
        (torch.ones(2, 3), torch.empty(2, 3, dtype=torch.int8), (2,)),
        (torch.ones(2, 3), torch.empty(2, 3, dtype=torch.int8), (1, 1)),
    ],
)
def test_misfits_are_shape_errors(
    weight: torch.Tensor, out: torch.Tensor, scale: tuple[int, ...]
) -> None:
    with pytest.raises(ShapeError, match="up_proj"):
        quantize_into(weight, out, torch.ones(scale), scheme="int8", name="up_proj")


def test_smoothing_of_the_wrong_length_is_a_shape_error() -> None:
    with pytest.raises(ShapeError, match="smoothing"):
        compute_scale(torch.ones(2, 3), "int8", smoothing=torch.ones(2))


def test_compute_scale_writes_where_told_or_refuses() -> None:
    out = torch.empty(2, 1)
    assert compute_scale(torch.ones(2, 3), "int8", out=out) is out
    assert torch.equal(out, torch.full((2, 1), 1 / 127))
    with pytest.raises(ShapeError):
        compute_scale(torch.ones(2, 3), "int8", out=torch.empty(3, 1))


def test_bf16_has_no_scale() -> None:
    with pytest.raises(SchemeError, match="bf16"):
        compute_scale(torch.ones(2, 3), "bf16")


def test_empty_weights_are_fine() -> None:
    for shape in ((0, 4), (4, 0)):
        out, _, _ = round_trip(torch.empty(shape), "int8")
        assert out.shape == shape
        assert clipped_fraction(torch.empty(shape), torch.ones(shape[0], 1), scheme="int8") == 0


class _LargestTensor(TorchFunctionMode):
    """Remembers the largest storage that any operation returned."""

    bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "view" not in str(func):
            owned = result.untyped_storage().nbytes()
            if result._base is None and owned > self.bytes and not self._given(result, args):
                self.bytes = owned
        return result

    @staticmethod
    def _given(result: torch.Tensor, args: tuple[object, ...]) -> bool:
        return any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == result.data_ptr()
            for a in args
        )


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_extra_memory_is_bounded_whatever_the_size(scheme: str) -> None:
    chosen = get_scheme(scheme)
    weight = torch.randn(4096, 2048)
    out = torch.empty(weight.shape, dtype=chosen.dtype)
    scale = torch.empty(chosen.scale_shape(weight.shape))
    with _LargestTensor() as largest:
        quantize_into(weight, out, scale, scheme=chosen)
    assert 0 < largest.bytes <= 8 << 20 < weight.untyped_storage().nbytes()


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(QUANTIZED), st.integers(0, 2**31))
def test_quantizing_the_dequantized_changes_nothing_beyond_rounding(
    rows: int, columns: int, name: str, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    _, _, once = round_trip(weight, name)
    _, _, twice = round_trip(once, name)
    assert torch.allclose(once, twice, rtol=2e-6, atol=1e-30)


@given(
    st.floats(2**-20, 2**20),
    st.sampled_from(QUANTIZED),
    st.integers(0, 2**31),
)
def test_scales_are_homogeneous(factor: float, name: str, seed: int) -> None:
    """compute_scale(c · w) = c · compute_scale(w)."""
    weight = torch.randn(11, 9, generator=torch.Generator().manual_seed(seed))
    scaled = compute_scale(weight * factor, name)
    assert torch.allclose(scaled, compute_scale(weight, name) * factor, rtol=1e-6)
