"""Data sheets and how a GPU is found by name."""

from __future__ import annotations

import pytest

from flashrl.core.predict.gpus import GPUS, get_gpu
from flashrl.core.schemes import get_scheme
from flashrl.errors import UnknownNameError, UnsupportedError


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("h200", "h200"),
        ("H100", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        (" NVIDIA B200 ", "b200"),
    ],
)
def test_product_names_find_their_data_sheet(product: str, name: str) -> None:
    assert get_gpu(product) is GPUS[name]


@pytest.mark.parametrize(
    "product", ["NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA GB200", "", "h2000"]
)
def test_a_name_that_only_resembles_one_is_refused_with_the_list(product: str) -> None:
    with pytest.raises(UnknownNameError, match="a100, h100, h200, l40s, b200"):
        get_gpu(product)


def test_a_misspelling_is_answered_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'h200'"):
        get_gpu("h20")


def test_a_data_sheet_passes_through() -> None:
    assert get_gpu(GPUS["b200"]) is GPUS["b200"]


@pytest.mark.parametrize(
    ("gpu", "bf16", "int8", "fp8"),
    # The sheets' sparse figures, halved; the L40S sheet prints both.
    [
        ("a100", 624 / 2, 1248 / 2, None),
        ("h100", 1979 / 2, 3958 / 2, 3958 / 2),
        ("h200", 1979 / 2, 3958 / 2, 3958 / 2),
        ("l40s", 362.05, 1466 / 2, 1466 / 2),
        ("b200", 4500 / 2, 9000 / 2, 9000 / 2),
    ],
)
def test_rates_are_dense(gpu: str, bf16: float, int8: float, fp8: float | None) -> None:
    sheet = get_gpu(gpu)
    assert sheet.matmul_tflops(get_scheme("bf16")) == bf16
    assert sheet.matmul_tflops(get_scheme("int8")) == int8
    if fp8 is not None:
        assert sheet.matmul_tflops(get_scheme("fp8_block")) == fp8


def test_a100_says_that_it_has_no_fp8() -> None:
    with pytest.raises(UnsupportedError, match=r"A100.* has no fp8 units.*use int8"):
        get_gpu("a100").matmul_tflops(get_scheme("fp8"))
