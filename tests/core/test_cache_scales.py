"""Bounds of what an FP8 KV cache stores, and scales that hold them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.cache_scales import bound_norm, bound_projection, choose_cache_scale
from flashrl.errors import NonFiniteError


def rms_norm(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    normed = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], eps=1e-6)
    return normed * factors.double()


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([3, 16, 300]),
    outlier=st.sampled_from([1.0, 1e3]),
)
def test_no_normalized_vector_passes_the_bound_of_a_projection(
    seed: int, width: int, outlier: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(8, width, generator=generator), torch.randn(8, generator=generator)
    factors = torch.randn(width, generator=generator) + 1
    x = torch.randn(64, width, generator=generator)
    x[:, 0] *= outlier
    y = rms_norm(x, factors) @ weight.double().T + bias.double()
    bound = bound_projection(weight, factors, bias=bias).double()
    assert (y.abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_worst_vector_reaches_the_bound(dtype: torch.dtype) -> None:
    """x̂ along w ∘ g: the bound is as tight as any for all inputs."""
    weight, factors = torch.randn(1, 64).to(dtype), (torch.rand(64) + 0.5).to(dtype)
    worst = (weight[0].double() * factors.double())[None]
    y = rms_norm(worst * 1e4, factors) @ weight.double().T
    assert torch.allclose(y[0], bound_projection(weight, factors).double(), rtol=1e-5)


@given(seed=st.integers(0, 2**32 - 1), angle=st.floats(0, 2 * math.pi))
def test_no_turned_pair_passes_the_bound_of_a_norm(seed: int, angle: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(16, generator=generator)
    first, second = rms_norm(torch.randn(64, 16, generator=generator), factors).chunk(2, dim=1)
    turned = first * math.cos(angle) - second * math.sin(angle)
    assert turned.abs().max() <= bound_norm(factors).double() * (1 + 1e-6)


@given(st.floats(1e-12, 1e12))
def test_a_scale_is_the_smallest_power_of_two_that_holds_its_bound(bound: float) -> None:
    scale = choose_cache_scale(bound)
    assert math.frexp(scale)[0] == 0.5
    assert 224 < bound / scale <= 448


def test_small_steps_leave_a_scale_where_it_is() -> None:
    """A cache that is read with another scale than it was written with is wrong everywhere."""
    bound = 300.0
    assert len({choose_cache_scale(bound * (1 + step / 1000)) for step in range(100)}) == 1


def test_extreme_bounds() -> None:
    assert choose_cache_scale(0.0) == 1.0
    for bound in (5e-324, 1e-40, 1e300):
        scale = torch.tensor(choose_cache_scale(bound), dtype=torch.float32)
        assert torch.isfinite(scale)
        assert torch.isfinite(1 / scale)
    for bound in (math.nan, math.inf):
        with pytest.raises(NonFiniteError, match="KV cache"):
            choose_cache_scale(bound)


def test_a_loose_scale_costs_e4m3_next_to_nothing() -> None:
    """Values 100 times under the bound: as exact as with the scale that just holds them."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))

    def error(scale: float) -> float:
        stored = (values / scale).to(torch.float8_e4m3fn).float() * scale
        return float((stored - values).norm() / values.norm())

    tight = choose_cache_scale(float(values.abs().max()))
    loose = choose_cache_scale(100 * float(values.abs().max()))
    assert loose >= 64 * tight
    assert error(loose) < 1.01 * error(tight)
