"""Two halves of a weight that a sender quantized find each other."""

from __future__ import annotations

import math

import pytest
import torch

from flashrl.core.schemes import get_scheme
from flashrl.core.updates.halves import Halves, is_half, weight_of
from flashrl.errors import NonFiniteError, SchemeError, ShapeError

NAME, SCALE = "a.weight", "a.weight_scale"
INT8 = get_scheme("int8")
VALUES = torch.arange(8, dtype=torch.int8).view(2, 4)


def take(
    halves: Halves, name: str, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    return halves.take(name, tensor, weight=NAME, shape=(2, 4), scheme=INT8)


@pytest.mark.parametrize("scale_first", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (2,)], ids=str)
def test_they_meet_in_any_order(scale_first: bool, shape: tuple[int, ...]) -> None:
    halves, scale = Halves(), torch.tensor([0.5, 2.0], dtype=torch.bfloat16).view(shape)
    pairs = [(NAME, VALUES.clone()), (SCALE, scale.clone())]
    first, second = reversed(pairs) if scale_first else pairs
    assert take(halves, *first) is None
    assert halves.missing(NAME) is not None
    first[1].fill_(9)  # the sender's buffer is its own again
    both = take(halves, *second)
    assert both is not None
    assert torch.equal(both[0], VALUES)
    assert torch.equal(both[1], torch.tensor([[0.5], [2.0]]))
    assert halves.missing(NAME) is None


def test_the_newest_half_counts() -> None:
    halves = Halves()
    take(halves, NAME, VALUES)
    assert take(halves, NAME, VALUES + 1) is None
    both = take(halves, SCALE, torch.ones(2, 1))
    assert both is not None
    assert torch.equal(both[0], VALUES + 1)


def test_what_waited_can_be_forgotten() -> None:
    halves = Halves()
    take(halves, NAME, VALUES)
    halves.forget(NAME)
    assert take(halves, SCALE, torch.ones(2, 1)) is None
    assert halves.missing(NAME) == "scale came without its values"


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        (NAME, VALUES[:1], ShapeError),
        (NAME, VALUES.float().to(torch.float8_e4m3fn), SchemeError),
        (SCALE, torch.ones(3, 1), ShapeError),
        (SCALE, torch.ones(2, 1, dtype=torch.int32), ShapeError),
    ],
    ids=["rows", "type", "scale's rows", "scale's type"],
)
def test_what_does_not_fit_is_not_kept(
    name: str, tensor: torch.Tensor, error: type[Exception]
) -> None:
    halves = Halves()
    with pytest.raises(error, match="int8" if error is SchemeError else r"shape"):
        take(halves, name, tensor)
    assert halves.missing(NAME) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_none_is_not_kept(value: float) -> None:
    halves, flag = Halves(), torch.zeros(1, dtype=torch.int32)
    bad = torch.tensor([[1.0], [value]])
    with pytest.raises(NonFiniteError, match="finite and positive"):
        take(halves, SCALE, bad)
    assert halves.missing(NAME) is None
    for scale, raised in ((bad, 1), (torch.ones(2, 1), 0)):
        halves.take(SCALE, scale, weight=NAME, shape=(2, 4), scheme=INT8, flag=flag)
        assert flag.tolist() == [raised]


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_nan_of_fp8_is_not_kept(bits: int) -> None:
    values = torch.tensor([[0x7E, bits]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    halves, fp8 = Halves(), get_scheme("fp8_channel")
    with pytest.raises(NonFiniteError, match="NaN"):
        halves.take(NAME, values, weight=NAME, shape=(1, 2), scheme=fp8)
    assert halves.missing(NAME) is None
    halves.take(NAME, values[:, :1], weight=NAME, shape=(1, 1), scheme=fp8)
    assert halves.missing(NAME) == "values came without a scale"


def test_names_tell_halves_from_others() -> None:
    assert is_half(SCALE, torch.ones(1))
    assert is_half(NAME, VALUES)
    assert not is_half(NAME, torch.ones(1))
    assert not is_half("input_scale", torch.ones(1))
    assert weight_of(SCALE) == weight_of(NAME) == NAME
