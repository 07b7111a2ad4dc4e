"""The book kept of a weight update: what arrived, what was refused, what never came."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs
import torch

from flashrl.core.interfaces import NamedTensors, WeightInfo
from flashrl.core.names import NameIndex
from flashrl.core.updates.halves import is_half, weight_of
from flashrl.core.updates.pushes import ExpertLayout, checkpoint_tensors, find_layout
from flashrl.core.updates.quantized import SCALE_SUFFIX
from flashrl.errors import FlashRLError, WeightUpdateError

__all__ = ["UpdateLedger", "load_each"]

_SHOWN = 8


@attrs.define
class UpdateLedger:
    """Lets through what the engine expects, and remembers the rest until the end.

    An update is read to its end even after a fault, because the sender may be gathering shards
    with other ranks that would otherwise wait for ever.

    Args:
        expected: Every tensor of a full update, by checkpoint name.
        quantized: Let weights through that the sender quantized; both halves must come.
    """

    expected: Mapping[str, WeightInfo]
    quantized: bool = False
    arrived: set[str] = attrs.field(factory=set, init=False)
    faults: dict[str, str] = attrs.field(factory=dict, init=False)
    _index: NameIndex = attrs.field(init=False)
    _by_alias: dict[str, str] = attrs.field(init=False)
    _layout: ExpertLayout = attrs.field(init=False)
    _halves: dict[str, set[str]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._by_alias = {
            alias: name for name, info in self.expected.items() for alias in info.aliases
        }
        self._index = NameIndex((*self.expected, *self._by_alias))
        self._layout = find_layout(self.expected)

    def admit(
        self, named_tensors: NamedTensors, *, lora_scale: float | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that fit, under the engine's names; note the others as faults.

        Args:
            named_tensors: As the trainer has them; see :func:`checkpoint_tensors`.
            lora_scale: alpha / rank, where LoRA factors are to be merged.
        """
        try:
            for raw_name, tensor in checkpoint_tensors(
                named_tensors, lora_scale=lora_scale, layout=self._layout
            ):
                half = self.quantized and is_half(raw_name, tensor)
                weight = weight_of(raw_name) if half else raw_name
                ending = raw_name.removeprefix(weight)
                found = self._index.find(weight) or weight
                name = self._by_alias.get(found, found)
                fault = self._fault(name, tensor, half=half)
                if fault:
                    self.faults[name + ending] = fault
                    continue
                self._note(name, ending, half=half)
                yield name + ending, tensor
        except WeightUpdateError as error:  # at the end, so the engine can say its own faults too
            self.faults.update(error.faults)

    def _note(self, name: str, ending: str, *, half: bool) -> None:
        came = self._halves.setdefault(name, set()) if half else {"", SCALE_SUFFIX}
        came.add(ending)
        if len(came) == 2:
            self.arrived.add(name)

    def refuse(self, faults: Mapping[str, str]) -> None:
        """Take back tensors that the engine refused."""
        self.faults.update(faults)
        self.arrived.difference_update(map(weight_of, faults))

    def finish(self) -> None:
        """End the update.

        Raises:
            WeightUpdateError: Something was refused or is missing; the message lists both.
        """
        for name, halves in self._halves.items():
            if len(halves) == 1 and name not in self.arrived:
                half = "its values" if SCALE_SUFFIX in halves else "its scale"
                self.faults.setdefault(name, f"came in 8 bit without {half}")
        missing = sorted(self.expected.keys() - self.arrived - set(map(weight_of, self.faults)))
        if not (self.faults or missing):
            return
        lines = _first(f"{name}: {fault}" for name, fault in self.faults.items())
        if missing:
            lines.append(f"{len(missing)} never came: {', '.join(_first(missing))}")
        raise WeightUpdateError(
            f"weight update incomplete: {len(self.arrived)} of {len(self.expected)} tensors "
            "arrived, so the weights are part old, part new; push all of them again.\n  "
            + "\n  ".join(lines),
            faults=self.faults,
            missing=missing,
            arrived=sorted(self.arrived),
        )

    def _fault(self, name: str, tensor: torch.Tensor, *, half: bool) -> str | None:
        info = self.expected.get(name)
        if info is None:
            close = difflib.get_close_matches(name, self.expected, n=1)
            return "the engine has no such weight" + (f"; close: {close[0]}" if close else "")
        if half:  # whose shape and type the engine looks at
            kept = info.scheme is None
            return "is quantized, and the engine keeps this weight in 16 bit" if kept else None
        if tuple(tensor.shape) != info.shape:
            return f"has shape {tuple(tensor.shape)}, the engine's is {info.shape}"
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            return f"has dtype {tensor.dtype}; float32, bfloat16 or float16 is expected"
        return None


def load_each(named_tensors: NamedTensors, load: Callable[[str, torch.Tensor], None]) -> None:
    """Load tensors one by one, past those that are refused, and raise once at the end.

    Args:
        named_tensors: Names and tensors, in any order.
        load: Puts one tensor in place, or raises a :class:`FlashRLError` and writes nothing.

    Raises:
        WeightUpdateError: Some were refused; ``faults`` says why, by name.
    """
    faults: dict[str, str] = {}
    for name, tensor in named_tensors:
        try:
            load(name, tensor)
        except FlashRLError as error:
            faults[name] = str(error)
    if faults:
        raise WeightUpdateError(
            "tensors were refused:\n  " + "\n  ".join(_first(faults.values())), faults=faults
        )


def _first(items: Iterable[str]) -> list[str]:
    shown = list(items)
    more = len(shown) - _SHOWN
    return [*shown[:_SHOWN], f"and {more} more"] if more > 0 else shown
