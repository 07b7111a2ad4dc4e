"""The proof itself: what it expects, and that it can fail."""

from __future__ import annotations

import pytest
import torch

from flashrl.core.interfaces import WeightInfo
from flashrl.core.quantize import dequantize, quantize_into
from flashrl.core.schemes import get_scheme
from flashrl.core.updates.verify import VerifyReport, compare, compute_expected
from flashrl.errors import VerificationError

INT8 = get_scheme("int8")


def expected(tensor: torch.Tensor, info: WeightInfo) -> torch.Tensor:
    [(_, result)] = compute_expected([("w", tensor)], {"w": info})
    return result


def test_kept_tensors_are_rounded_to_the_engines_dtype() -> None:
    weight = torch.randn(3, 4)
    info = WeightInfo(shape=(3, 4), dtype=torch.bfloat16)
    assert torch.equal(expected(weight, info), weight.bfloat16().float())


def test_tensor_parallel_slices_have_their_own_scales() -> None:
    """A row-parallel weight is quantized a rank at a time."""
    weight = torch.randn(3, 8)
    weight[:, 4:] *= 10
    info = WeightInfo(shape=(3, 8), dtype=torch.int8, scheme=INT8, num_input_shards=2)
    result = expected(weight, info)
    for half in (slice(0, 4), slice(4, 8)):
        step = weight[:, half].abs().amax(dim=1, keepdim=True) / 127
        assert bool(((result[:, half] - weight[:, half]).abs() <= 0.501 * step).all())
    whole = expected(weight, WeightInfo(shape=(3, 8), dtype=torch.int8, scheme=INT8))
    assert not torch.equal(result, whole)


def test_compare_counts_what_differs() -> None:
    info = WeightInfo(shape=(2, 2), dtype=torch.int8, scheme=INT8)
    held, wanted = torch.zeros(2, 2), torch.zeros(2, 2)
    assert compare("w", held, wanted, info).equal
    held[0, 1] = 0.25
    found = compare("w", held, wanted, info)
    assert (found.equal, found.differing, found.max_abs_error, found.scheme) == (
        False,
        1,
        0.25,
        "int8",
    )


def test_nan_in_the_engine_is_a_difference() -> None:
    info = WeightInfo(shape=(1,), dtype=torch.bfloat16)
    found = compare("w", torch.tensor([torch.nan]), torch.zeros(1), info)
    assert not found.equal
    assert found.scheme == "bfloat16"


def test_a_report_raises_with_the_names_and_only_then() -> None:
    info = WeightInfo(shape=(1,), dtype=torch.bfloat16)
    good = compare("good", torch.zeros(1), torch.zeros(1), info)
    bad = [compare(f"bad{i}", torch.ones(1), torch.zeros(1), info) for i in range(10)]
    VerifyReport(version=1, comparisons=(good,)).raise_for_mismatch()
    report = VerifyReport(version=1, comparisons=(good, *bad))
    with pytest.raises(VerificationError, match=r"10 of 11.*\n.*bad0 \(bfloat16\)") as caught:
        report.raise_for_mismatch()
    assert "and 2 more" in str(caught.value)
    assert "good (" not in str(caught.value)
    assert caught.value.report is report


def test_nothing_compared_is_not_a_pass() -> None:
    with pytest.raises(VerificationError, match="nothing to compare"):
        VerifyReport(version=0, comparisons=()).raise_for_mismatch()


def test_expected_is_the_round_trip_of_the_reference() -> None:
    weight = torch.randn(5, 6)
    out, scale = torch.empty(5, 6, dtype=torch.int8), torch.empty(5, 1)
    quantize_into(weight, out, scale, scheme=INT8)
    info = WeightInfo(shape=(5, 6), dtype=torch.int8, scheme=INT8)
    assert torch.equal(expected(weight, info), dequantize(out, scale, scheme=INT8))
