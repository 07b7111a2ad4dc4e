"""Histograms of log-ratios that add up, for percentiles of a batch that no one rank holds.

The bins follow the bits of a float32: each binade of ``|x|`` from 2⁻¹³ up to 20 is cut into 256
equal bins, and what is smaller shares the bin in the middle.  Logarithmic bins bound the relative
error of a percentile (DDSketch, Masson et al. 2019), and these need no logarithm: the middle of a
bin is within 0.2 % of everything in it, or within 2⁻¹³ of it in the middle bin.
"""

from __future__ import annotations

import torch

__all__ = ["NUM_BINS", "count_bins", "fold", "percentile"]

_DROPPED_BITS = 23 - 8  # of a float32's 23 fraction bits, 8 choose one of 256 bins
_FIRST = (127 - 13) << 8  # the bits that are left of 2⁻¹³
_NUM_A_SIDE = (((127 + 4) << 8) + 64) - _FIRST + 1  # up to and with 20 = 1.25 · 2⁴

NUM_BINS = 2 * _NUM_A_SIDE + 1
"""Bins of a histogram, from -20 to 20, zero in the middle."""


def count_bins(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Count the values in each bin.

    Args:
        values: Finite, within ± 20, any shape.
        mask: 1 where a value counts, else 0, the same shape.

    Returns:
        The counts, int64, (NUM_BINS,).

    Example:
        >>> counts = count_bins(torch.tensor([0.0, 0.5, 7.0]), torch.tensor([1.0, 1.0, 0.0]))
        >>> counts.sum(), counts[NUM_BINS // 2]
        (tensor(2), tensor(1))
    """
    bits = values.to(torch.float32).view(torch.int32) >> _DROPPED_BITS
    side = (bits & 0xFFFF).sub_(_FIRST - 1).clamp_(0, _NUM_A_SIDE)  # 0 in the middle
    sign = bits >> 31  # -1 below zero, else 0; (x ^ -1) + 1 is -x
    bins = (side ^ sign).sub_(sign).add_(_NUM_A_SIDE + 1)
    bins.mul_(mask.to(torch.int32))  # one more bin, the first, for what does not count
    if bins.is_cuda:  # bincount would wait for the device
        counts = torch.histc(bins, NUM_BINS + 1, 0, NUM_BINS)
    else:
        counts = torch.bincount(bins.flatten(), minlength=NUM_BINS + 1)
    return counts[1:].to(torch.int64)


def fold(counts: torch.Tensor) -> torch.Tensor:
    """The histogram of ``|x|`` from that of x.

    Args:
        counts: (NUM_BINS,).

    Returns:
        The counts, (NUM_BINS,).
    """
    folded = counts + counts.flip(0)
    folded[_NUM_A_SIDE] = counts[_NUM_A_SIDE]
    folded[:_NUM_A_SIDE] = 0
    return folded


def percentile(counts: torch.Tensor, percent: int) -> torch.Tensor:
    """The smallest value that at least ``percent`` in a hundred do not exceed.

    Args:
        counts: (histograms, NUM_BINS).
        percent: 1 to 100.

    Returns:
        The middle of the bin that value lies in, float64, (histograms,).

    Example:
        >>> values = torch.arange(1.0, 11.0)
        >>> percentile(count_bins(values, torch.ones(10)).unsqueeze(0), 50).round(decimals=1)
        tensor([5.], dtype=torch.float64)
    """
    # In integers, so that 95 of 100 is not 95.00000000000001 of them.
    below = 100 * counts.cumsum(dim=-1) < percent * counts.sum(dim=-1, keepdim=True)
    side = below.sum(dim=-1) - _NUM_A_SIDE
    half_a_bin = 1 << (_DROPPED_BITS - 1)
    bits = ((side.abs() + _FIRST - 1).to(torch.int32) << _DROPPED_BITS) + half_a_bin
    return bits.view(torch.float32).to(torch.float64) * side.sign()
