"""Products of 8-bit matrices: exact, and equal whichever way is taken."""

from __future__ import annotations

import pytest
import torch

from flashrl.core.quantize import products, quantize_into
from flashrl.core.quantize.activations import quantize_activations
from flashrl.core.schemes import get_scheme


@pytest.mark.parametrize("shape", [(1, 16, 8), (3, 33, 5), (20, 2000, 64), (4, 5000, 16)])
def test_integer_products_agree_bit_for_bit(shape: tuple[int, int, int]) -> None:
    tokens, columns, rows = shape
    scheme = get_scheme("int8")
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    weight[0] = 127
    scale, x = torch.rand(rows, 1), torch.randn(tokens, columns)
    x[0] = 1.0
    expected = products._int_mm(x, weight, scale, scheme)
    assert torch.equal(products._float32_of_integers(x, weight, scale, scheme), expected)


@pytest.mark.parametrize("scheme", ["int8", "fp8_channel", "fp8_tensor", "fp8_block"])
def test_products_equal_the_float64_product_of_what_is_stored(scheme: str) -> None:
    chosen = get_scheme(scheme)
    weight = torch.empty(48, 200, dtype=chosen.dtype)
    weight_scale = torch.empty(chosen.scale_shape(weight.shape))
    quantize_into(torch.randn(48, 200), weight, weight_scale, scheme=chosen)
    x = torch.randn(5, 200)
    got = products.choose_product(chosen, weight).multiply(x, weight, weight_scale, chosen)
    values, scale = quantize_activations(x, chosen)
    if chosen.input_strategy == "group":
        scale = scale.repeat_interleave(128, dim=1)[:, :200]
        weight_scale = weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight_scale = weight_scale[:48, :200]
    expected = (values.double() * scale) @ (weight.double() * weight_scale).t()
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("vnni", "name"), [(True, "torch._int_mm"), (False, "float32 product of integers")]
)
def test_a_cpu_without_vnni_multiplies_in_float32(
    monkeypatch: pytest.MonkeyPatch, vnni: bool, name: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni, raising=False)
    weight = torch.zeros(4, 8, dtype=torch.int8)
    assert products.choose_product(get_scheme("int8"), weight).name == name
