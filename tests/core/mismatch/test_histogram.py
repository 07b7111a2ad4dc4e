"""The histogram keeps its promise about percentiles, and adds up."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.mismatch.histogram import NUM_BINS, count_bins, fold, percentile

LISTS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50)


def histogram(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    return count_bins(tensor, torch.ones_like(tensor))


@given(LISTS, st.integers(1, 100))
def test_percentiles_are_within_a_five_hundredth_of_the_value(values, percent):
    exact = np.quantile(np.array(values), percent / 100 - 1e-12, method="inverted_cdf")
    found = float(percentile(histogram(values).unsqueeze(0), percent))
    assert found == pytest.approx(exact, rel=0.002, abs=2**-13)


@given(LISTS, LISTS)
def test_histograms_add_up(left, right):
    assert torch.equal(histogram(left) + histogram(right), histogram(left + right))


@given(LISTS)
def test_folding_counts_magnitudes(values):
    assert torch.equal(fold(histogram(values)), histogram([abs(value) for value in values]))


def test_the_ends_and_the_middle_have_their_bins():
    counts = histogram([-20.0, 0.0, 1e-30, 20.0])
    assert counts.nonzero().flatten().tolist() == [0, NUM_BINS // 2, NUM_BINS - 1]


def test_what_does_not_count_is_not_counted():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert torch.equal(count_bins(values, mask), histogram([1.0, 4.0]))
