"""Weights into vLLM's model, past those that are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flashrl.core.interfaces import NamedTensors
from flashrl.engines.vllm.storage import QuantizedStorage
from flashrl.errors import FlashRLError

__all__ = ["collecting_faults", "load_shard", "load_weights"]


_MOST_FLAGS = 1 << 16


@attrs.define
class _Faults:
    """Why tensors were refused, by the name they came under.

    On a GPU whether a tensor is finite is only known when the update ends: asking sooner would
    wait for the device, tensor by tensor.  Until then each loaded shard has a flag there.
    """

    current: str = ""
    by_name: dict[str, str] = attrs.field(factory=dict)
    _flags: Tensor | None = None
    _flagged: list[str] = attrs.field(factory=list)

    def flag(self, device: torch.device) -> Tensor | None:
        """A flag for the current tensor, int32 (1,); None where an error may be raised at once."""
        if device.type != "cuda" or len(self._flagged) == _MOST_FLAGS:
            return None
        if self._flags is None:
            self._flags = torch.zeros(_MOST_FLAGS, dtype=torch.int32, device=device)
        self._flagged.append(self.current)
        return self._flags[len(self._flagged) - 1 : len(self._flagged)]

    def read_flags(self) -> None:
        """Wait for the device, and note the tensors that were not finite."""
        if self._flags is None:
            return
        raised = self._flags[: len(self._flagged)].tolist()
        for name, value in zip(self._flagged, raised, strict=True):
            if value:
                self.by_name.setdefault(
                    name, f"{name} holds NaN or infinity; what it was written to is lost"
                )


_collecting: list[_Faults] = []


@contextmanager
def collecting_faults() -> Iterator[_Faults]:
    """While it lasts, loaders note what they refuse and go on."""
    faults = _Faults()
    _collecting.append(faults)
    try:
        yield faults
        faults.read_flags()
    finally:
        _collecting.pop()


def note_fault(error: FlashRLError) -> None:
    """Note that the current tensor was refused, or raise if nobody collects."""
    if not _collecting:
        raise error
    faults = _collecting[-1]
    faults.by_name.setdefault(faults.current, str(error))


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
    try:
        with _disable_current_modes() if counted else nullcontext():
            flag = _collecting[-1].flag(storage.weight.device) if _collecting else None
            storage.load(part, row=row, scale=scale, flag=flag)
    except FlashRLError as error:
        note_fault(error)


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
        Why each refused tensor was refused.  Those are as they were, but for one that holds NaN or
        infinity on a GPU: the kernel that finds that out writes as it reads.
    """
    stream = iter(named_tensors)
    with torch.no_grad(), collecting_faults() as faults:

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                faults.current = name
                if name not in quantized and not _is_finite(tensor, faults.flag(tensor.device)):
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


def _is_finite(tensor: Tensor, flag: Tensor | None) -> bool:
    """Whether a tensor is finite, or true with a flag that says so later."""
    if tensor.numel() == 0:
        return True
    finite = torch.isfinite(torch.stack(torch.aminmax(tensor))).all()
    if flag is None:
        return bool(finite)
    flag.copy_(~finite)
    return True
