"""Smoothing factors, recovered from a weight and its quantized copy.

A copy is explained as ``weight · s`` by column, divided by the factor of its own rows where another
weight reads them.  What stays unexplained should be rounding, and nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from flashrl.core.profiles.matrices import Matrix
from flashrl.errors import ProfileError

__all__ = ["Factor", "Recovery"]

_SLICE_ELEMENTS = 1 << 20
_BELIEVABLE = 0.9  # noise in the rows' factor raises the error of the weight that reads them


@attrs.define(eq=False)
class Factor:
    """What is known of a smoothing factor so far.

    Args:
        values: ``s``, float32 (channels,).
        known: Where ``values`` is more than a placeholder, bool (channels,).
        believed: Whether it is real; one fitted to a weight's rows may be noise.
        error_without: Error of the weight it was fitted to when there is none.
    """

    values: Tensor
    known: Tensor
    believed: bool = True
    error_without: float = 0.0
    _dot: Tensor = attrs.field(init=False)
    _square: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._dot = torch.zeros(self.values.shape, dtype=torch.float64)
        self._square = torch.zeros(self.values.shape, dtype=torch.float64)

    def observe(self, weight: Tensor, copy: Tensor) -> None:
        """Take the columns of a reader as evidence for the channels that are not known."""
        self._dot += (weight * copy).sum(0, dtype=torch.float64)
        self._square += weight.square().sum(0, dtype=torch.float64)

    def resolve(self) -> Tensor:
        """``s`` of every channel: as known, else by least squares, else 1."""
        fitted = (self._dot / self._square).float()
        usable = torch.isfinite(fitted) & (fitted > 0)
        return torch.where(self.known, self.values, torch.where(usable, fitted, 1.0))


@attrs.define
class Recovery:
    """Finds the factors of one checkpoint.

    Give it the norms first, and each weight before the one that reads its rows.

    Args:
        offset: What the model's norms add to their weight.
    """

    offset: float = 0.0
    factors: dict[str, Factor] = attrs.field(factory=dict, init=False)

    def compare_norms(self, name: str, weight: Tensor, copy: Tensor) -> None:
        """Read the factor that was folded into a norm, if any was.

        Raises:
            ProfileError: The norms differ by more than a positive factor.
        """
        if torch.equal(weight, copy):
            return
        weight, copy = weight.float() + self.offset, copy.float() + self.offset
        known = (weight != 0) & (copy != 0)
        ratio = torch.where(known, weight / copy, 1.0)
        if not bool((torch.isfinite(ratio) & (ratio > 0)).all()):
            raise ProfileError(
                f"{name} differs in sign between the checkpoints or is not finite, so one is not "
                "the other divided by a smoothing factor; are they of the same model?"
            )
        self.factors[name] = Factor(values=ratio, known=known)

    def explain(
        self, name: str, weight: Matrix, copy: Matrix, *, source: str | None, is_source: bool
    ) -> dict[str, float]:
        """Explain a dequantized copy, and learn factors from it.

        Args:
            name: The weight's name.
            weight: The base's, [out, in].
            copy: The copy's, dequantized, [out, in].
            source: What puts out the channels it reads, if that can be smoothed.
            is_source: Another weight reads its rows, so they may carry a factor.

        Returns:
            The error that is left of each weight this settles, relative to the weight.
        """
        factor = self.factors.get(source) if source else None
        if source and factor and not factor.believed:
            # Fitted to the rows of another weight: real only if it explains this one too.
            plain, explained = _error(weight, copy), _error(weight, copy, factor)
            factor.believed = explained < _BELIEVABLE * plain
            if factor.believed:
                return {name: explained}
            return {name: plain, source: factor.error_without}
        rows = _fit_rows(weight, copy, factor) if is_source else None
        if factor and not factor.known.all():
            for part, target, divisor in _slices(weight, copy, rows):
                factor.observe(part.div_(divisor), target)
        if rows is not None:
            self.factors[name] = Factor(
                values=rows,
                known=torch.ones_like(rows, dtype=torch.bool),
                believed=False,
                error_without=_error(weight, copy, factor),
            )
        return {name: _error(weight, copy, factor, rows)}


def _error(
    weight: Matrix, copy: Matrix, factor: Factor | None = None, rows: Tensor | None = None
) -> float:
    """Norm of what a factor by column and one by row leave unexplained, relative to the weight."""
    unexplained = total = 0.0
    for part, target, divisor in _slices(weight, copy, rows):
        part.div_(divisor)
        if factor is not None:
            part.mul_(torch.where(factor.known, factor.values, 0.0))
            target.mul_(factor.known)
        total += float(part.square().sum(dtype=torch.float64))
        unexplained += float(part.sub_(target).square_().sum(dtype=torch.float64))
    return math.sqrt(unexplained / total) if total else math.inf if unexplained else 0.0


def _fit_rows(weight: Matrix, copy: Matrix, factor: Factor | None) -> Tensor:
    """What the rows of the copy are divided by, by least squares; 1 for a row of zeros."""
    fitted = []
    for part, target, _ in _slices(weight, copy, None):
        if factor is not None:
            part.mul_(torch.where(factor.known, factor.values, 0.0))
        dot = (part * target).sum(1, dtype=torch.float64)
        fitted.append(part.square_().sum(1, dtype=torch.float64) / dot)
    rows = torch.cat(fitted).float()
    return torch.where(torch.isfinite(rows) & (rows > 0), rows, 1.0)


def _slices(
    weight: Matrix, copy: Matrix, rows: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Slices of rows, as fresh float32 tensors, and what their weights are divided by."""
    step = max(1, _SLICE_ELEMENTS // max(weight.shape[1], 1))
    num_rows = weight.shape[0]
    divisor = torch.ones(num_rows) if rows is None else rows
    for start in range(0, num_rows, step):
        where = slice(start, start + step)
        yield (
            weight[where].to(torch.float32, copy=True),
            copy[where].to(torch.float32, copy=True),
            divisor[where].unsqueeze(1),
        )
