"""Activation quantization, against a float64 loop."""

from __future__ import annotations

import pytest
import torch

from flashrl.core.quantize.activations import quantize_activations
from flashrl.core.schemes import QuantScheme, get_scheme

TENSOR = get_scheme("fp8_tensor").evolve(name="fp8_tensor_input", input_strategy="tensor")
SCHEMES = [get_scheme("int8"), get_scheme("fp8_channel"), get_scheme("fp8_block"), TENSOR]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_within_half_a_step(scheme: QuantScheme, dtype: torch.dtype) -> None:
    x = (torch.randn(4, 300) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])).to(dtype)
    values, scale = quantize_activations(x, scheme)
    assert values.dtype == scheme.dtype
    for i in range(4):
        for j in range(300):
            if scheme.input_strategy == "group":
                group, used = x[i, j // 128 * 128 : j // 128 * 128 + 128], scale[i, j // 128]
            elif scheme.input_strategy == "tensor":
                group, used = x.flatten(), scale[0, 0]
            else:
                group, used = x[i], scale[i, 0]
            amax = max(abs(v) for v in group.double().tolist())
            step = amax / scheme.qmax if amax else 1.0
            assert used.item() == pytest.approx(step, rel=1e-6)
            value = x[i, j].item()
            width = step if scheme.type == "int" else max(abs(value) / 8, step * 2**-9)
            assert abs(values[i, j].item() * used.item() - value) <= width / 2 * (1 + 1e-4)


def test_scale_shapes() -> None:
    x = torch.randn(3, 200)
    shapes = {s.name: tuple(quantize_activations(x, s)[1].shape) for s in SCHEMES}
    assert shapes == {
        "int8": (3, 1),
        "fp8_channel": (3, 1),
        "fp8_block": (3, 2),
        "fp8_tensor_input": (1, 1),
    }
