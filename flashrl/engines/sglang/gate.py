"""What stands before a model's own ``load_weights``: bad tensors do not get past it.

SGLang leaves out names that it does not know, pads shapes that do not fit, and ends the whole
engine on an exception.  The gate lets through what fits, smoothed as the profile says, and
remembers the rest by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from flashrl.core.names import NameIndex
from flashrl.core.profiles import Profile
from flashrl.core.updates.halves import Halves, is_half, weight_of
from flashrl.core.updates.pushes import EXPERT_LAYOUTS, ExpertLayout, checkpoint_tensors
from flashrl.engines.sglang.faults import as_error, find_fault, find_nonfinite
from flashrl.engines.sglang.slots import Slot, by_alias, find_slots
from flashrl.engines.sglang.smoother import Smoother
from flashrl.engines.sglang.storage import QuantizedParameter, QuantizedStorage
from flashrl.errors import (
    FlashRLError,
    SchemeError,
    UnsupportedError,
    WeightUpdateError,
)

__all__ = ["WeightGate", "gate_of"]

# What checkpoints carry and models do not need.
_EXTRA = re.compile(r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.attn\.(masked_)?bias)$")
_RELEASED = "the weights were released, and this one was not pushed since"


class WeightGate:
    """Checks tensors on their way into one rank's model.

    Args:
        model: A model of SGLang's; its ``load_weights`` is wrapped.
        model_type: Its ``config.model_type``.
        profile: Smoothing factors and static scales.

    Raises:
        ProfileError: The profile does not fit the model; ``load_weights`` is as it was.
        SchemeError: The scheme has static scales, and the profile lacks one.

    Attributes:
        slots: Every tensor of a full update, by checkpoint name.
        owed: Why weights must be pushed before the engine may generate again, by name.
        smoother: Applies the profile.

    Until :meth:`open` it takes a checkpoint's names as they are, and lets through what the model
    has not; from then on such a name is an error.
    """

    def __init__(self, model: Any, *, model_type: str = "", profile: Profile | None = None) -> None:
        self._model = model
        self._layout = EXPERT_LAYOUTS.get(model_type, ExpertLayout())
        self._load = model.load_weights
        self._opened = False
        self._faults: dict[str, str] = {}
        self._passed: dict[str, Slot] = {}
        self._arrived: set[str] = set()
        self._halves = Halves()
        self.owed: dict[str, str] = {}
        self.slots = find_slots(model, layout=self._layout)
        self._named = by_alias(self.slots)
        self._index = NameIndex(tuple(self._named))
        self.smoother = Smoother(profile, self.slots)
        by_row = {
            (id(slot.parameter.home), slot.rows.start): slot
            for slot in self.slots.values()
            if isinstance(slot.parameter, QuantizedParameter)
        }
        for home in self._homes():
            home.report = partial(self._refuse, by_row, id(home))
        model.flashrl_gate = self
        model.load_weights = self.load_weights

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
        self._faults, self._passed, self._arrived = {}, {}, set()
        if not self._opened:
            result = self._load(self._check(weights), *args, **kwargs)
            self._raise_faults()
            for home in self._homes():
                home.check_complete()
            return result
        admitted = self._admit(weights)
        try:
            result = self._load(admitted, *args, **kwargs)
        except Exception as error:
            # SGLang's own complaint.  The rest is read, since senders wait for one another.
            reason = f"SGLang's loader refused it: {type(error).__name__}: {error}"
            self._faults[next(reversed(self._passed), "weights")] = reason
            for name, _ in admitted:
                self._faults.setdefault(name, "not loaded, because of another tensor of the push")
        for name, slot in self._passed.items():
            if name not in self._faults and not _came(slot):
                self._faults[name] = "SGLang's loader left it out"
        self._settle(self._passed.keys() - self._faults.keys())
        self._raise_faults()
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
            inside = [slot for slot in self.slots.values() if slot.parameter is parameter]
            if parameter is None or not inside:
                self._faults[name] = "the engine has no such parameter in 16 bit"
                continue
            fault = find_fault(tensor, tuple(parameter.shape)) or find_nonfinite(tensor)
            if fault:
                self._faults[name] = fault
                continue
            parameter.data.copy_(self.smoother.smooth_parts(tensor, inside))
            for slot in inside:
                self._halves.forget(slot.name)
            self._settle({slot.name for slot in inside} - self._faults.keys())
        self._raise_faults()

    def lose_all(self) -> None:
        """Note that every weight is gone until it is pushed again."""
        self.owed = dict.fromkeys(self.slots, _RELEASED)

    def check_whole(self) -> None:
        """Complain if what :meth:`load_weights` was called with last was no whole checkpoint.

        Raises:
            WeightUpdateError: Names what it lacks; that must come before the engine generates.
        """
        missing = [name for name in self.slots if name not in self._arrived]
        for name in missing:
            self.owed.setdefault(name, "the checkpoint that was loaded last lacks it")
        if missing:
            raise WeightUpdateError(f"no whole checkpoint: {self.find_debt()}", missing=missing)

    def find_debt(self) -> str | None:
        """Why the engine may not generate now, for people; None if it may."""
        if not self.owed:
            return None
        name, reason = next(iter(self.owed.items()))
        return (
            f"{len(self.owed)} of {len(self.slots)} weights are missing ({name}: {reason}); "
            "push a full update before generating"
        )

    def _homes(self) -> Iterator[QuantizedStorage]:
        homes = {
            id(slot.parameter): slot.parameter.home
            for slot in self.slots.values()
            if isinstance(slot.parameter, QuantizedParameter)
        }
        yield from homes.values()

    def _admit(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What fits of a push, under names that SGLang's loader knows."""
        try:
            for name, tensor in checkpoint_tensors(weights, layout=self._layout):
                weight = weight_of(name)
                slot = self._named.get(self._index.find(weight) or weight)
                if slot is None:
                    if not _EXTRA.match(name):
                        self._faults[name] = "the engine has no such weight"
                elif is_half(name, tensor):
                    self._take_half(name, tensor, slot)
                elif self._fits(name, tensor, slot, shape=slot.shape):
                    yield slot.name, self.smoother.smooth(tensor, slot)
        except WeightUpdateError as error:  # after the last tensor
            self._faults.update(error.faults)

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What fits of a checkpoint on disk; names and shapes are SGLang's own business there."""
        for name, tensor in weights:
            slot = self._named.get(name)
            if slot is None:
                yield name, tensor
            elif self._fits(name, tensor, slot, shape=tuple(tensor.shape)):
                yield name, self.smoother.smooth(tensor, slot)

    def _fits(self, name: str, tensor: Tensor, slot: Slot, *, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is of a shape and holds 16- or 32-bit numbers; notes it if not."""
        fault = find_fault(tensor, shape)
        # Quantizing finds what is not finite itself, if this rank has all of it.
        if fault is None and (slot.scheme is None or slot.ranks > 1):
            fault = find_nonfinite(tensor)
        if fault:
            self._faults[name] = fault
            return False
        self._passed[slot.name] = slot
        self._halves.forget(slot.name)
        if isinstance(slot.parameter, QuantizedParameter):
            slot.parameter.home.expect(slot.rows.start)
        return True

    def _take_half(self, name: str, tensor: Tensor, slot: Slot) -> None:
        try:
            if slot.name in self._passed:
                raise SchemeError("came beside the same weight in 16 bit; push one of them")
            if slot.scheme is None:
                raise SchemeError("is quantized, and the engine keeps this weight in 16 bit")
            if self.smoother.of(slot) is not None or not slot.scheme.dynamic:
                raise UnsupportedError(
                    "was quantized by the sender, and the engine's profile has a say in that; "
                    "push it in 16 bit, or start the engine without the profile"
                )
            both = self._halves.take(
                name, tensor, weight=slot.name, shape=slot.shape, scheme=slot.scheme
            )
        except FlashRLError as error:
            self._faults[name] = str(error)
            return
        if both is None:
            self.owed[slot.name] = self._halves.missing(slot.name) or ""
        else:
            slot.take(*both)
            self._settle([slot.name])

    def _settle(self, names: Iterable[str]) -> None:
        for name in names:
            self._arrived.add(name)
            self.owed.pop(name, None)

    def _refuse(
        self, by_row: dict[tuple[int, int], Slot], home: int, row: int, error: FlashRLError
    ) -> None:
        slot = by_row.get((home, row))
        self._faults[slot.name if slot else f"row {row}"] = str(error)

    def _raise_faults(self) -> None:
        if self._faults:
            raise as_error(self._faults)


def gate_of(model: nn.Module) -> WeightGate | None:
    """The gate before a model, or None."""
    gate: WeightGate | None = getattr(model, "flashrl_gate", None)
    return gate


def _came(slot: Slot) -> bool:
    """Whether what was expected was loaded; of a kept tensor nobody can tell."""
    parameter = slot.parameter
    return not isinstance(parameter, QuantizedParameter) or parameter.home.has(slot.rows.start)
