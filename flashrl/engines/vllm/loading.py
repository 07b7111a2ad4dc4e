"""How a shard that vLLM's loaders cut out gets into its storage, and what becomes of faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flashrl.engines.vllm.storage import QuantizedStorage
from flashrl.errors import FlashRLError, NonFiniteError

__all__ = ["Faults", "is_finite", "load_shard", "watching"]

_MOST_FLAGS = 1 << 16


@attrs.define
class Faults:
    """Why tensors were refused, by the name they came under.

    On a GPU whether a tensor is finite is only known when the push ends: asking sooner would wait
    for the device, tensor by tensor.  Until then each loaded shard has a flag there.

    Args:
        collect: Note what is refused and go on, rather than raise.
    """

    collect: bool
    current: str = ""
    by_name: dict[str, str] = attrs.field(factory=dict)
    _flags: Tensor | None = None
    _flagged: list[str] = attrs.field(factory=list)

    def note(self, error: FlashRLError) -> None:
        """Note that the current tensor was refused, or raise if nobody collects."""
        if not self.collect:
            raise error
        self.by_name.setdefault(self.current, str(error))

    def flag(self, device: torch.device) -> Tensor | None:
        """A flag for the current tensor, int32 (1,); None where an error may be raised at once."""
        if device.type != "cuda" or len(self._flagged) == _MOST_FLAGS:
            return None
        if self._flags is None:
            self._flags = torch.zeros(_MOST_FLAGS, dtype=torch.int32, device=device)
        self._flagged.append(self.current)
        return self._flags[len(self._flagged) - 1 : len(self._flagged)]

    def lost(self, name: str) -> None:
        """Note a tensor that was found not to be finite after it was written."""
        self.by_name.setdefault(
            name, f"{name} holds NaN or infinity; what it was written to is lost"
        )

    def finish(self) -> None:
        """Wait for the device, and note the tensors that were not finite.

        Raises:
            NonFiniteError: There are some, and nobody collects.
        """
        raised = [] if self._flags is None else self._flags[: len(self._flagged)].tolist()
        for name, value in zip(self._flagged, raised, strict=True):
            if value:
                self.lost(name)
        if self.by_name and not self.collect:
            raise NonFiniteError("; ".join(list(self.by_name.values())[:8]))


_watching: list[Faults] = []


@contextmanager
def watching(*, collect: bool) -> Iterator[Faults]:
    """A push: what loaders refuse while it lasts is raised, or collected until it ends."""
    faults = Faults(collect=collect)
    _watching.append(faults)
    try:
        yield faults
        faults.finish()
    finally:
        _watching.pop()


def load_shard(
    parameter: Any,
    storage: QuantizedStorage,
    part: Tensor,
    *,
    row: int,
    scale: Tensor | None = None,
) -> None:
    """Take a shard on behalf of a parameter that vLLM loads.

    Args:
        parameter: What vLLM passed: the layer's own, or a stand-in of a reload.
        storage: Where the weight lives.
        part: This rank's part, [rows, in].
        row: Where it starts.
        scale: As :meth:`QuantizedStorage.load` takes it.

    Raises:
        NonFiniteError: As :meth:`QuantizedStorage.load`, unless faults are being collected.
        ShapeError: Likewise.
    """
    if part.is_meta:  # see placement.py
        storage.weight.narrow(0, row, part.shape[0]).copy_(part)
        return
    counted = parameter.is_meta
    if counted:
        # A layerwise reload: vLLM counts the elements that a loader copies to a parameter without
        # data, keeps a reference, and calls again with a temporary parameter when the layer is
        # complete.  By then the sender may have overwritten its buffer, so the shard goes home
        # now, uncounted, and not then.
        parameter.data.view(storage.weight.shape).narrow(0, row, part.shape[0]).copy_(part)
        parameter.is_temporary = True
    elif getattr(parameter, "is_temporary", False):
        return
    faults = _watching[-1] if _watching else Faults(collect=False)
    try:
        with _disable_current_modes() if counted else nullcontext():
            flag = faults.flag(storage.weight.device) if _watching else None
            storage.load(part, row=row, scale=scale, flag=flag)
    except FlashRLError as error:
        faults.note(error)


def is_finite(tensor: Tensor, flag: Tensor | None) -> bool:
    """Whether a tensor is finite, or true with a flag that says so later."""
    if tensor.numel() == 0:
        return True
    finite = torch.isfinite(torch.stack(torch.aminmax(tensor))).all()
    if flag is None:
        return bool(finite)
    flag.copy_(~finite)
    return True
