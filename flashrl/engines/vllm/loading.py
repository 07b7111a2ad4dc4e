"""Weights into vLLM's model, past those that are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from flashrl.core.interfaces import NamedTensors
from flashrl.errors import FlashRLError

__all__ = ["collecting_faults", "load_weights", "note_fault"]


@attrs.define
class _Faults:
    """Why tensors were refused, by the name they came under."""

    current: str = ""
    by_name: dict[str, str] = attrs.field(factory=dict)


_collecting: list[_Faults] = []


@contextmanager
def collecting_faults() -> Iterator[_Faults]:
    """While it lasts, loaders note what they refuse and go on."""
    faults = _Faults()
    _collecting.append(faults)
    try:
        yield faults
    finally:
        _collecting.pop()


def note_fault(error: FlashRLError) -> None:
    """Note that the current tensor was refused, or raise if nobody collects."""
    if not _collecting:
        raise error
    faults = _collecting[-1]
    faults.by_name.setdefault(faults.current, str(error))


def load_weights(
    model: Any, named_tensors: NamedTensors, quantized: Collection[str]
) -> dict[str, str]:
    """Hand tensors to the model's own ``load_weights``, one at a time.

    Args:
        model: vLLM's model.
        named_tensors: Names and tensors whose shapes were checked; each may be overwritten as soon
            as the next is asked for.
        quantized: Names that a quantizing loader checks itself.

    Returns:
        Why each refused tensor was refused; those are as they were.
    """
    stream = iter(named_tensors)
    with torch.no_grad(), collecting_faults() as faults:

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                faults.current = name
                if name not in quantized and not torch.isfinite(tensor).all():
                    faults.by_name[name] = f"{name} holds NaN or infinity; nothing was written"
                else:
                    yield name, tensor

        try:
            model.load_weights(checked())
        except Exception as error:
            # vLLM's own complaint.  The rest is read, since the sender may be gathering shards
            # together with other ranks.
            faults.by_name[faults.current] = f"vLLM refused it: {type(error).__name__}: {error}"
            for name, _ in stream:
                faults.by_name[name] = "not loaded, because vLLM refused a tensor before it"
    return faults.by_name
