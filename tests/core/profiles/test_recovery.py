"""Factors recovered from small matrices whose answer is plain to see."""

from __future__ import annotations

import math

import pytest
import torch

from flashrl.core.profiles.recovery import Recovery
from flashrl.errors import ProfileError


def test_the_ratio_of_norms_is_the_factor() -> None:
    recovery = Recovery()
    recovery.compare_norms("norm", torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.5]))
    assert recovery.factors["norm"].resolve().tolist() == [0.25, 4.0]


def test_equal_norms_say_nothing() -> None:
    recovery = Recovery()
    recovery.compare_norms("norm", torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert recovery.factors == {}


@pytest.mark.parametrize("copy", [[1.0, -2.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_ratio_that_is_no_factor_is_an_error(copy: list[float]) -> None:
    with pytest.raises(ProfileError, match="the_norm differs in sign"):
        Recovery().compare_norms("the_norm", torch.tensor([1.0, 2.0]), torch.tensor(copy))


def test_columns_tell_where_the_norm_is_zero() -> None:
    """All readers together, by least squares: (1·3 + 2·8) / (1² + 2²) = 3.8."""
    recovery = Recovery()
    recovery.compare_norms("norm", torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    for weight, copy in ((1.0, 3.0), (2.0, 8.0)):
        errors = recovery.explain(
            "reader",
            torch.tensor([[1.0, weight]]),
            torch.tensor([[0.5, copy]]),
            source="norm",
            is_source=False,
        )
        assert errors == {"reader": 0.0}
    assert recovery.factors["norm"].resolve().tolist() == pytest.approx([0.5, 3.8])


def test_rows_are_believed_when_the_reader_agrees() -> None:
    recovery = Recovery()
    up = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    recovery.explain("up", up, up / torch.tensor([[2.0], [5.0]]), source=None, is_source=True)
    assert not recovery.factors["up"].believed
    down = torch.tensor([[1.0, 1.0]])
    errors = recovery.explain(
        "down", down, torch.tensor([[2.0, 5.0]]), source="up", is_source=False
    )
    assert recovery.factors["up"].believed
    assert recovery.factors["up"].resolve().tolist() == pytest.approx([2.0, 5.0])
    assert errors["down"] == pytest.approx(0.0, abs=1e-6)


def test_rows_are_not_believed_when_the_reader_does_not() -> None:
    recovery = Recovery()
    up = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    recovery.explain("up", up, up / 2.0, source=None, is_source=True)
    down = torch.tensor([[1.0, 1.0]])
    errors = recovery.explain("down", down, down, source="up", is_source=False)
    assert not recovery.factors["up"].believed
    assert errors == {"down": 0.0, "up": pytest.approx(0.5)}


@pytest.mark.parametrize("row", [[0.0, 0.0], [-3.0, -4.0]])
def test_a_row_without_a_positive_factor_has_one(row: list[float]) -> None:
    recovery = Recovery()
    up = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    copy = torch.stack([up[0] / 2.0, torch.tensor(row)])
    recovery.explain("up", up, copy, source=None, is_source=True)
    assert recovery.factors["up"].values.tolist() == [2.0, 1.0]


def test_a_copy_of_zeros_is_explained_only_by_zeros() -> None:
    zeros = torch.zeros(1, 2)
    for copy, error in ((zeros, 0.0), (torch.ones(1, 2), math.inf)):
        assert Recovery().explain("w", zeros, copy, source=None, is_source=False) == {"w": error}
