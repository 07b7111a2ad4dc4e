"""What is wrong with a tensor, and how it travels through the one string that SGLang answers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from flashrl.errors import WeightUpdateError

__all__ = ["as_error", "find_fault", "find_nonfinite", "parse_faults"]

_MARK = " flashrl-faults: "
_SHOWN = 8


def find_fault(tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    """Why a tensor is no 16- or 32-bit tensor of a shape; None if it is."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return f"has dtype {tensor.dtype}; float32, bfloat16 or float16 is expected"
    if tuple(tensor.shape) != shape:
        return f"has shape {tuple(tensor.shape)}, the engine's is {shape}"
    return None


def find_nonfinite(tensor: Tensor) -> str | None:
    """Why a tensor is no weight, whatever its shape; None if it is."""
    if bool(torch.isfinite(tensor).all()):
        return None
    return "holds NaN or infinity; nothing was written"


def as_error(faults: Mapping[str, str]) -> WeightUpdateError:
    """An error for people that SGLang turns into a string, and :func:`parse_faults` back."""
    lines = [f"{name}: {fault}" for name, fault in list(faults.items())[:_SHOWN]]
    more = len(faults) - len(lines)
    return WeightUpdateError(
        f"{len(faults)} tensors were refused, each is as it was: "
        + "; ".join(lines)
        + (f"; and {more} more" if more > 0 else "")
        + _MARK
        + json.dumps(faults),
        faults=faults,
    )


def parse_faults(message: str) -> dict[str, str]:
    """The refused tensors that a message of SGLang's carries, by name."""
    faults: dict[str, str] = {}
    for found in message.split(_MARK)[1:]:
        refused, _ = json.JSONDecoder().raw_decode(found)
        faults.update(refused)
    return faults
