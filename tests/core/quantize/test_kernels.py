"""The kernels' bits against the reference's, on a GPU, or else through Triton's interpreter.

The interpreter runs the same source on the CPU.  Where Triton is missing, or so old that its
interpreter rounds a fused multiply-add twice, these tests are skipped and say so; the reference
itself is tested in test_quantize.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.quantize import kernels, quantize_into
from flashrl.core.schemes import PRESETS, QuantScheme, get_scheme
from flashrl.errors import SchemeError, ShapeError, UnsupportedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEMES = [scheme for scheme in PRESETS.values() if scheme.quantized]
SCHEMES.append(
    get_scheme("fp8_block").evolve(name="int8_block", type="int", block_structure=(3, 40))
)
BF16 = torch.bfloat16


def why_not() -> str:
    """Why the kernels cannot be tested here; empty if they can."""
    if DEVICE == "cuda":
        return "" if kernels.available(DEVICE) else "this GPU is too old for the kernels"
    try:
        with pytest.MonkeyPatch.context() as patch:  # Triton asks when it is first imported.
            patch.setenv("TRITON_INTERPRET", "1")
            interpreter = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return "Triton is not installed: only the reference is tested"
    largest = importlib.import_module("triton.language").max
    assert isinstance(largest, interpreter.InterpretedFunction), "Triton was imported before"
    fused = hasattr(interpreter._interpreter, "fma_fp32")
    return "" if fused else "this Triton's interpreter rounds a fused multiply-add twice"


needs_kernels = pytest.mark.skipif(bool(why_not()), reason=why_not())
# NumPy warns of the infinities that these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def empty(shape: tuple[int, int], scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Storage for a weight of ``shape``, filled with what no kernel would write."""
    out = torch.empty(shape, dtype=scheme.dtype, device=DEVICE)
    out.view(torch.uint8).fill_(0x55)
    return out, torch.full(scheme.scale_shape(shape), 7.0, device=DEVICE)


def assert_same_bits(
    weight: torch.Tensor,
    scheme: str | QuantScheme,
    *,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
) -> None:
    """The kernel writes what the reference writes on a CPU, and raises no flag."""
    scheme = get_scheme(scheme)
    fresh = empty((weight.shape[0], weight.shape[1]), scheme)
    out = fresh[0] if out is None else out
    scale = fresh[1] if scale is None else scale
    want_out, want_scale = torch.empty(weight.shape, dtype=scheme.dtype), scale.cpu().clone()
    on_cpu = None if smoothing is None else smoothing.cpu()
    quantize_into(weight.cpu(), want_out, want_scale, scheme=scheme, smoothing=on_cpu)
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize(weight, out, scale, scheme=scheme, smoothing=smoothing, flag=flag)
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(out.cpu().view(torch.uint8), want_out.view(torch.uint8))
    assert flag.item() == 0


def random_weight(rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normal values of many magnitudes, with a zero row and negative zeros."""
    weight = torch.randn(rows, columns) * torch.logspace(-2, 2, columns)
    weight[:1] = 0.0
    weight[-1:, ::3] = -0.0
    return weight.to(DEVICE, dtype)


def static(scheme: str | QuantScheme, **changes: object) -> QuantScheme:
    return get_scheme(scheme).evolve(dynamic=False, **changes)


@needs_kernels
def test_hand_computed_values() -> None:
    """A magnitude of 2 makes the int8 scale 2/127, and 0.5 · 127 / 2 = 31.75 rounds to 32."""
    out, scale = empty((1, 4), get_scheme("int8"))
    weight = torch.tensor([[0.5, -2.0, 0.0, 1.0]], device=DEVICE)
    kernels.quantize(weight, out, scale, scheme="int8")
    assert out.tolist() == [[32, -127, 0, 64]]
    assert scale.item() == pytest.approx(2 / 127, rel=1e-7)


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_every_scheme_and_dtype(scheme: QuantScheme, dtype: torch.dtype) -> None:
    assert_same_bits(random_weight(4, 70, dtype), scheme)


@needs_kernels
@pytest.mark.parametrize("scheme", ["int8", "fp8_tensor"])
def test_rows_too_long_for_registers_are_read_twice(scheme: str) -> None:
    assert_same_bits(random_weight(2, 61_440 + 1), scheme)


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("layout", ["transposed", "every other column", "offset", "expanded"])
def test_any_strides(scheme: QuantScheme, layout: str) -> None:
    """Transposed, strided and expanded inputs equal contiguous ones."""
    weight = random_weight(5, 90)
    strided = {
        "transposed": weight.t().contiguous().t(),
        "every other column": torch.stack([weight, weight], 2).flatten(1)[:, ::2],
        "offset": torch.cat([weight, weight], 1)[:, 45:135],
        "expanded": weight[3].expand(5, 90),
    }[layout]
    assert_same_bits(strided, scheme)


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_view_of_a_larger_destination(scheme: QuantScheme) -> None:
    """A shard goes into its place in a fused layer, and nowhere else."""
    whole, _ = empty((9, 120), scheme)
    assert_same_bits(random_weight(4, 70), scheme, out=whole[3:7, 20:90])
    untouched = whole.view(torch.uint8).clone()
    untouched[3:7, 20:90] = 0x55
    assert (untouched == 0x55).all()


@needs_kernels
@pytest.mark.parametrize("dynamic", [True, False])
def test_one_scale_spread_over_the_rows(dynamic: bool) -> None:
    """Shards of a fused layer keep their tensor scale in every row of theirs."""
    scheme = get_scheme("fp8_tensor").evolve(dynamic=dynamic)
    scales = torch.full((9, 1), 0.3, device=DEVICE)
    assert_same_bits(random_weight(5, 70), scheme, scale=scales[2:7])
    assert (scales[:2] == 0.3).all()
    assert (scales[7:] == 0.3).all()


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_smoothing(scheme: QuantScheme) -> None:
    smoothing = torch.logspace(-1, 1, 70).to(DEVICE)
    assert_same_bits(random_weight(3, 70), scheme, smoothing=smoothing)
    assert_same_bits(random_weight(3, 70), scheme, smoothing=smoothing.to(BF16))


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("value", [0.01, 1e-40, 1e38])
def test_static_scales_are_read_and_saturate(scheme: QuantScheme, value: float) -> None:
    scheme = scheme.evolve(dynamic=False)
    scale = torch.full(scheme.scale_shape((4, 70)), value, device=DEVICE)
    assert_same_bits(random_weight(4, 70), scheme, scale=scale)


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_all_zeros(scheme: QuantScheme) -> None:
    assert_same_bits(torch.zeros(3, 50, device=DEVICE), scheme)


@needs_kernels
@pytest.mark.parametrize("scheme", ["int8", "fp8_channel"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-40, 3e-37, 1e-19, 1e19, 3e38])
def test_magnitudes_at_the_ends_of_float32(scheme: str, magnitude: float) -> None:
    """Subnormal scales included, where the quotient can pass the largest 8-bit value."""
    weight = torch.randn(3, 64).clamp(-1, 1) * magnitude
    assert_same_bits(weight.to(DEVICE), scheme)


def ties_of(scheme: QuantScheme) -> list[float]:
    """The middles between neighbours among the positive 8-bit values."""
    grid = torch.arange(128, dtype=torch.uint8)
    grid = grid.float() if scheme.type == "int" else grid[:-1].view(scheme.dtype).float()
    return ((grid[1:] + grid[:-1]) / 2).tolist()


def close_calls(tie: float) -> Iterator[tuple[float, float]]:
    """Every float32 (value, scale) whose quotient lies almost in the middle of two floats.

    One of the two is the tie, and almost means within 2**-46.  In integers,
    value · 2**shift = middle · scale - rest, with a middle of 25 bits and a rest of at most 8: for
    each rest the scale is a modular inverse away.
    """
    nine_bits = int(math.frexp(tie)[0] * 512)
    below = (nine_bits << 16) - 1 if nine_bits > 256 else (256 << 17) - 1
    for middle in (below, (nine_bits << 16) + 1):
        for shift, rest in itertools.product((23, 24, 25), [*range(-8, 0), *range(1, 9)]):
            first = rest * pow(middle, -1, 1 << shift) % (1 << shift)
            for scale in range(first, 1 << 24, 1 << shift):
                value = (middle * scale - rest) >> shift
                if scale >= 1 << 23 <= value < 1 << 24:
                    yield value, math.ldexp(scale, round(math.log2(value / scale / tie)))


def beside_ties(tie: float) -> Iterator[tuple[float, float]]:
    """Every bf16 mantissa, with the scales within 3 floats of the one that makes it the tie."""
    for mantissa in range(128, 256):
        exact = torch.tensor(mantissa / tie).view(torch.int32)
        for scale in (exact + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32).tolist():
            yield mantissa, scale


@needs_kernels
@pytest.mark.parametrize("scheme", ["int8", "fp8_channel"])
@pytest.mark.parametrize("pairs", [close_calls, beside_ties])
def test_quotients_beside_a_tie_round_as_ieee_division_does(
    scheme: str, pairs: Callable[[float], Iterator[tuple[float, float]]]
) -> None:
    """Where a reciprocal errs: all such pairs on a GPU, a sample through the interpreter."""
    blocks = static("fp8_block", type=get_scheme(scheme).type, block_structure=(1, 1))
    found = torch.tensor([pair for tie in ties_of(get_scheme(scheme)) for pair in pairs(tie)])
    value, scale = found[:: 1 if DEVICE == "cuda" else len(found) // 60].T
    assert len(value) >= 60
    assert_same_bits(value[None].to(DEVICE), blocks, scale=scale[None].contiguous().to(DEVICE))


@needs_kernels
@pytest.mark.parametrize("scheme", ["int8", "fp8_channel"])
def test_powers_of_two_over_a_mantissa_of_ones(scheme: str) -> None:
    """2**k / (2 - 2**-23) is a hair more than half-way from the tie 2**(k-1) to the next float."""
    scale = torch.tensor([[1.0], [2.0]]).nextafter(torch.tensor(0.0)).to(DEVICE)
    powers = torch.logspace(-11, 6, 18, base=2.0).expand(2, 18).to(DEVICE, BF16)
    assert_same_bits(powers, static(scheme), scale=scale)


@needs_kernels
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 300),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([BF16, torch.float16, torch.float32]),
    spread=st.floats(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_law_same_bits_as_the_reference(
    rows: int, columns: int, scheme: QuantScheme, dtype: torch.dtype, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp(spread * torch.randn(rows, columns, generator=generator)).clamp(max=1e3)
    assert_same_bits(weight.to(DEVICE, dtype), scheme)


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nan_and_infinity_raise_the_flag(scheme: QuantScheme, value: float) -> None:
    weight = random_weight(2, 300)
    weight[1, 299] = value
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize(weight, *empty((2, 300), scheme), scheme=scheme, flag=flag)
    assert flag.item() == 1


@needs_kernels
def test_a_raised_flag_stays_raised() -> None:
    """One flag serves a whole update: finite weights leave it as it is."""
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize(random_weight(2, 30), *empty((2, 30), SCHEMES[0]), scheme="int8", flag=flag)
    assert flag.item() == 1


@needs_kernels
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_static_scale_that_is_no_scale_raises_the_flag(value: float) -> None:
    out, scale = empty((2, 30), get_scheme("int8"))
    scale[1] = value
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize(random_weight(2, 30), out, scale, scheme=static("int8"), flag=flag)
    assert flag.item() == 1


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_an_empty_weight(scheme: QuantScheme, shape: tuple[int, int]) -> None:
    weight = torch.empty(shape, device=DEVICE)
    out, scale = empty(shape, scheme)
    kernels.quantize(weight, out, scale, scheme=scheme)
    kernels.quantize(weight, out, scale * 3, scheme=scheme.evolve(dynamic=False))
    assert (scale == 1).all()


@needs_kernels
@pytest.mark.parametrize("scheme", ["int8", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("kind", ["mixed", "misaligned"])
def test_many_equal_one_by_one(scheme: str, kind: str) -> None:
    """A fused experts' weight equals per-expert results, whatever the mix of layouts."""
    if kind == "mixed":
        weights = [random_weight(rows, 48) for rows in (2, 3, 2, 0, 2)]
        weights.append(random_weight(2, 48, torch.float32))
    else:
        weights = [random_weight(2, 60)[:, 3:51] for _ in range(2)]
    found = get_scheme(scheme)
    triples = [(weight, *empty((len(weight), 48), found)) for weight in weights]
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize_many(triples, scheme=scheme, flag=flag)
    for weight, out, scale in triples:
        want_out, want_scale = empty((len(weight), 48), found)
        kernels.quantize(weight, want_out, want_scale, scheme=scheme)
        assert torch.equal(out.view(torch.uint8), want_out.view(torch.uint8))
        assert torch.equal(scale, want_scale)
    assert flag.item() == 0


@needs_kernels
def test_one_bad_weight_among_many_raises_the_flag() -> None:
    triples = [(random_weight(2, 48), *empty((2, 48), SCHEMES[0])) for _ in range(3)]
    triples[1][0][1, 5] = float("inf")
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize_many(triples, scheme="int8", flag=flag)
    assert flag.item() == 1


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 8, dtype=torch.int8)}, "weight must be float32"),
        ({"weight": torch.zeros(2, 8, 1)}, r"\[out, in\]"),
        ({"out": torch.zeros(2, 9, dtype=torch.int8)}, r"out must be torch.int8 \(2, 8\)"),
        ({"out": torch.zeros(2, 8)}, "got torch.float32"),
        ({"scale": torch.zeros(2)}, r"scale must be torch.float32 \(2, 1\)"),
        ({"smoothing": torch.zeros(7)}, r"smoothing must be torch.float32 \(8,\)"),
        ({"flag": torch.zeros(1)}, "flag must be torch.int32"),
        ({"flag": torch.zeros(1, dtype=torch.int32, device="meta")}, "on meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    given_ = {
        "weight": torch.ones(2, 8, device=DEVICE),
        "out": torch.full((2, 8), 5, dtype=torch.int8, device=DEVICE),
        "scale": torch.full((2, 1), 5.0, device=DEVICE),
    }
    changed = {name: t if t.is_meta else t.to(DEVICE) for name, t in change.items()}
    with pytest.raises(ShapeError, match=message):
        kernels.quantize(**{**given_, **changed}, scheme="int8")
    assert (given_["out"] == 5).all()
    assert (given_["scale"] == 5).all()


@needs_kernels
def test_schemes_without_a_kernel() -> None:
    huge = get_scheme("fp8_block").evolve(block_structure=(256, 256))
    weight, out = torch.ones(2, 8), torch.ones(2, 8, dtype=torch.float8_e4m3fn)
    assert not kernels.available(DEVICE, huge)
    assert not kernels.available(DEVICE, "bf16")
    assert not kernels.available("meta")
    with pytest.raises(UnsupportedError, match="too large"):
        kernels.quantize(weight, out, torch.ones(1, 1), scheme=huge)
    with pytest.raises(SchemeError, match="quantizes nothing"):
        kernels.quantize_many([], scheme="bf16")


@needs_kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_graph_replays_the_update_without_allocating(scheme: QuantScheme) -> None:
    weight, (out, scale) = random_weight(300, 700), empty((300, 700), scheme)
    kernels.quantize(weight, out, scale, scheme=scheme)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.quantize(weight, out, scale, scheme=scheme)
    assert torch.cuda.max_memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.quantize(weight, out, scale, scheme=scheme)
    weight.copy_(random_weight(300, 700))
    graph.replay()
    got = out.clone(), scale.clone()
    assert_same_bits(weight, scheme, out=out, scale=scale)
    assert torch.equal(got[0].view(torch.uint8), out.view(torch.uint8))
    assert torch.equal(got[1], scale)


def test_importing_the_module_imports_no_triton() -> None:
    program = "import sys, flashrl.core.quantize.kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("version", "answer"), [(None, False), ("2.3.1", False), ("3.6.0+local", True)]
)
def test_a_missing_or_old_triton_has_no_kernels(
    version: str | None, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(_: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    kernels._has_triton.cache_clear()
    assert kernels.available(DEVICE) is answer
    monkeypatch.undo()
    kernels._has_triton.cache_clear()


def test_a_cpu_without_the_interpreter_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available("cpu")
