"""What stands before a model's own ``load_weights``: bad tensors do not get past it.

SGLang leaves out names that it does not know, pads shapes that do not fit, and ends the whole
engine on an exception.  The gate lets through what fits, and remembers the rest by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashrl.core.names import NameIndex
from flashrl.core.updates.pushes import EXPERT_LAYOUTS, ExpertLayout, checkpoint_tensors
from flashrl.engines.sglang.slots import Slot, by_alias, find_slots
from flashrl.engines.sglang.storage import QuantizedParameter, QuantizedStorage
from flashrl.errors import FlashRLError, WeightUpdateError

__all__ = ["WeightGate", "gate_of", "parse_faults"]

logger = logging.getLogger(__name__)

# What checkpoints carry and models do not need.
_EXTRA = re.compile(r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.attn\.(masked_)?bias)$")
_MARK = " flashrl-faults: "


class WeightGate:
    """Checks tensors on their way into one rank's model.

    Args:
        model: A model of SGLang's; its ``load_weights`` is wrapped.
        model_type: Its ``config.model_type``.

    Attributes:
        slots: Every tensor of a full update, by checkpoint name.
        owed: Names that must be pushed before the engine may generate again.

    Until :meth:`open` it takes a checkpoint's names as they are, and lets through what the model
    has not; from then on such a name is an error.
    """

    def __init__(self, model: Any, *, model_type: str = "") -> None:
        self._model = model
        self._model_type = model_type
        self._load = model.load_weights
        self._opened = False
        self._faults: dict[str, str] = {}
        self._passed: set[str] = set()
        self.owed: set[str] = set()
        self.refresh()
        model.flashrl_gate = self
        model.load_weights = self.load_weights

    def refresh(self) -> None:
        """Look again where tensors live, after layers were swapped."""
        self.slots = find_slots(self._model, model_type=self._model_type)
        self._named = by_alias(self.slots)
        self._index = NameIndex(tuple(self._named))
        self._by_row = {
            (id(slot.parameter.home), slot.rows.start): slot
            for slot in self.slots.values()
            if isinstance(slot.parameter, QuantizedParameter)
        }
        for home in self._homes():
            home.report = partial(self._refuse, id(home))

    def open(self) -> None:
        """Note that the model is loaded; what comes from now on is pushed."""
        self._opened = True

    def remove(self) -> None:
        """Give the model its own ``load_weights`` back."""
        for home in self._homes():
            home.report = None
        del self._model.load_weights, self._model.flashrl_gate

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """Load what fits, with the model's own loader.

        Raises:
            WeightUpdateError: Some tensors were refused, after all others were loaded.
        """
        self._faults, self._passed = {}, set()
        admitted = self._admit(weights) if self._opened else self._check(weights)
        result = self._load(admitted, *args, **kwargs)
        self.owed -= self._passed - self._faults.keys()
        self._raise_faults()
        if not self._opened:
            for home in self._homes():
                home.check_complete()
        return result

    def load_direct(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into parameters that are named as the engine has them.

        Raises:
            WeightUpdateError: As :meth:`load_weights`.
        """
        self._faults = {}
        parameters = dict(self._model.named_parameters())
        for name, tensor in named_tensors:
            parameter = parameters.get(name)
            if parameter is None:
                self._faults[name] = "the engine has no such parameter"
                continue
            fault = _find_fault(tensor, tuple(parameter.shape)) or _find_nonfinite(tensor)
            if fault:
                self._faults[name] = fault
                continue
            parameter.data.copy_(tensor)
            self.owed -= {s.name for s in self.slots.values() if s.parameter is parameter}
        self._raise_faults()

    def lose_all(self) -> None:
        """Note that every weight is gone until it is pushed again."""
        self.owed = set(self.slots)

    def _homes(self) -> Iterator[QuantizedStorage]:
        homes = {
            id(slot.parameter): slot.parameter.home
            for slot in self.slots.values()
            if isinstance(slot.parameter, QuantizedParameter)
        }
        yield from homes.values()

    def _admit(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What fits of a push, under names that SGLang's loader knows."""
        layout = EXPERT_LAYOUTS.get(self._model_type, ExpertLayout())
        try:
            for name, tensor in checkpoint_tensors(weights, layout=layout):
                slot = self._named.get(self._index.find(name) or name)
                if slot is None:
                    if not _EXTRA.match(name):
                        self._faults[name] = "the engine has no such weight"
                elif self._fits(name, tensor, slot, shape=slot.shape):
                    # SGLang knows a tied tensor by its first name only.
                    yield (slot.name if name in slot.aliases else name), tensor
        except WeightUpdateError as error:  # after the last tensor
            self._faults.update(error.faults)

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What fits of a checkpoint on disk; names and shapes are SGLang's own business there."""
        for name, tensor in weights:
            slot = self._named.get(name)
            if slot is None or self._fits(name, tensor, slot, shape=tuple(tensor.shape)):
                yield name, tensor

    def _fits(self, name: str, tensor: Tensor, slot: Slot, *, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is of a shape and holds 16- or 32-bit numbers; notes it if not."""
        fault = _find_fault(tensor, shape)
        if fault is None and slot.scheme is None:  # quantizing finds what is not finite itself
            fault = _find_nonfinite(tensor)
        if fault:
            self._faults[name] = fault
        else:
            self._passed.add(slot.name)
        return fault is None

    def _refuse(self, home: int, row: int, error: FlashRLError) -> None:
        slot = self._by_row.get((home, row))
        self._faults[slot.name if slot else f"row {row}"] = str(error)

    def _raise_faults(self) -> None:
        if not self._faults:
            return
        lines = [f"{name}: {fault}" for name, fault in list(self._faults.items())[:8]]
        more = len(self._faults) - len(lines)
        raise WeightUpdateError(
            f"{len(self._faults)} tensors were refused, each is as it was: "
            + "; ".join(lines)
            + (f"; and {more} more" if more > 0 else "")
            + _MARK
            + json.dumps(self._faults),
            faults=self._faults,
        )


def gate_of(model: nn.Module) -> WeightGate | None:
    """The gate before a model, or None."""
    gate: WeightGate | None = getattr(model, "flashrl_gate", None)
    return gate


def parse_faults(message: str) -> dict[str, str]:
    """The refused tensors that a message of SGLang's carries, by name."""
    faults: dict[str, str] = {}
    for found in message.split(_MARK)[1:]:
        refused, _ = json.JSONDecoder().raw_decode(found)
        faults.update(refused)
    return faults


def _find_fault(tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return f"has dtype {tensor.dtype}; float32, bfloat16 or float16 is expected"
    if tuple(tensor.shape) != shape:
        return f"has shape {tuple(tensor.shape)}, the engine's is {shape}"
    return None


def _find_nonfinite(tensor: Tensor) -> str | None:
    if bool(torch.isfinite(tensor).all()):
        return None
    return "holds NaN or infinity; nothing was written"
