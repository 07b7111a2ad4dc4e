"""What a profile does to tensors on their way into one rank's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flashrl.core.profiles import Profile
from flashrl.core.profiles.smoothing import Smoothing
from flashrl.engines.sglang.slots import Slot
from flashrl.engines.sglang.storage import QuantizedParameter
from flashrl.errors import SchemeError

__all__ = ["Smoother"]


class Smoother:
    """Smooths tensors, and sets static scales once.

    Args:
        profile: Smoothing factors and static scales; without it every tensor passes.
        slots: Every tensor of the model, by checkpoint name.

    Raises:
        ProfileError: The profile does not fit the model.
        SchemeError: The scheme has static scales, and the profile lacks one.

    Attributes:
        profile: As given.
        pushed: This rank's part of kept tensors that smoothing changed, as they were pushed.
    """

    def __init__(self, profile: Profile | None, slots: Mapping[str, Slot]) -> None:
        if profile is not None:
            profile.check({name: slot.shape for name, slot in slots.items()})
        self.profile = profile
        self.pushed: dict[str, Tensor] = {}
        for slot in slots.values():
            self._set_static_scale(slot)

    def of(self, slot: Slot) -> Smoothing | None:
        """What is done to a whole tensor; None for nothing."""
        return None if self.profile is None else self.profile.smoothing_for(slot.name)

    def smooth(self, tensor: Tensor, slot: Slot) -> Tensor:
        """A whole tensor as the engine stores it."""
        smoothing = self.of(slot)
        if smoothing is None:
            return tensor
        if slot.scheme is None:
            self.pushed[slot.name] = slot.part(tensor).clone()
        return smoothing.apply(tensor, dtype=torch.float32)

    def smooth_parts(self, tensor: Tensor, inside: Iterable[Slot]) -> Tensor:
        """A parameter of this rank's, made of the parts of some slots, as the engine stores it."""
        smoothed = tensor
        for slot in inside:
            smoothing = self.of(slot)
            if smoothing is None:
                continue
            if smoothed is tensor:
                smoothed = tensor.contiguous().to(torch.float32, copy=True)
            rows = smoothed.flatten(0, -2) if smoothed.ndim == 3 else smoothed
            if slot.scheme is None:
                self.pushed[slot.name] = tensor[slot.rows].clone()
            rows[slot.rows] = slot.cut_smoothing(smoothing).apply(rows[slot.rows])
        return smoothed

    def undo_parts(self, values: Tensor, inside: Iterable[Slot]) -> Tensor:
        """The inverse of :meth:`smooth_parts` for a matrix in float32, in place."""
        for slot in inside:
            smoothing = self.of(slot)
            if smoothing is None:
                continue
            smoothing, rows = slot.cut_smoothing(smoothing), values[slot.rows]
            if smoothing.columns is not None:
                rows.div_(smoothing.columns.to(rows.device))
            if smoothing.rows is not None:
                rows.mul_(smoothing.rows.to(rows.device)[:, None])
        return values

    def _set_static_scale(self, slot: Slot) -> None:
        parameter, scheme = slot.parameter, slot.scheme
        if not isinstance(parameter, QuantizedParameter) or scheme is None or scheme.dynamic:
            return
        scale = self.profile.scale_for(slot.name) if self.profile is not None else None
        if scale is None:
            raise SchemeError(
                f"scheme {scheme.name!r} has static scales, and the profile has none for "
                f"{slot.name}; pass a profile that has, or a dynamic scheme"
            )
        parameter.home.scale_of(slot.rows).copy_(slot.cut_scale(scale))
