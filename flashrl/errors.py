"""Every error FlashRL raises on purpose.

One root, and each class is also the built-in that a caller would expect, so both
``except FlashRLError`` and ``except ValueError`` work.  A message says what failed, what was given,
what is allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "AdapterError",
    "ConfigError",
    "EngineStateError",
    "FlashRLError",
    "MissingDependencyError",
    "NonFiniteError",
    "ProfileError",
    "RolloutError",
    "SchemeError",
    "ShapeError",
    "UnknownNameError",
    "UnsupportedError",
    "VerificationError",
    "WeightUpdateError",
]


class FlashRLError(Exception):
    """Root of every error raised by FlashRL."""


class UnknownNameError(FlashRLError, LookupError):
    """A name (scheme, adapter, preset, parameter) is not known; the message lists the known."""


class SchemeError(FlashRLError, ValueError):
    """A quantization scheme is inconsistent, or does not fit the layer it is applied to."""


class ShapeError(FlashRLError, ValueError):
    """Tensors disagree in shape, dtype or device."""


class NonFiniteError(FlashRLError, ValueError):
    """A tensor holds NaN or infinity where only finite values make sense."""


class ConfigError(FlashRLError, ValueError):
    """A configuration is invalid; the message lists every fault with its path in the file."""


class ProfileError(FlashRLError, ValueError):
    """A profile is malformed, unsafe to load, or does not belong to the model."""


class RolloutError(FlashRLError, ValueError):
    """A rollout is incomplete or contradicts itself: missing log-probabilities, unknown tokens."""


class MissingDependencyError(FlashRLError, ImportError):
    """A framework is not installed; the message names the extra that brings it."""


class AdapterError(FlashRLError, LookupError):
    """No adapter owns the object, or two distributions claim the same adapter name."""


class UnsupportedError(FlashRLError, NotImplementedError):
    """The engine cannot do what was asked exactly; the message says why and what works instead."""


class EngineStateError(FlashRLError, RuntimeError):
    """The engine is not in a state that allows the call: shut down, asleep, or generating."""


class WeightUpdateError(FlashRLError, RuntimeError):
    """A weight update did not complete; the message says what arrived and what is wrong.

    Args:
        message: For people.
        faults: Why each refused tensor was refused, by the name it was pushed under.
        missing: Names that never came.
        arrived: Names that were loaded.
    """

    def __init__(
        self,
        message: str,
        *,
        faults: Mapping[str, str] | None = None,
        missing: Sequence[str] = (),
        arrived: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})
        self.missing = tuple(missing)
        self.arrived = tuple(arrived)


class VerificationError(FlashRLError, RuntimeError):
    """The engine's weights are not the ones that were pushed; the message names the layers.

    Args:
        message: For people.
        report: The :class:`flashrl.core.updates.verify.VerifyReport` behind it, if one was made.
    """

    def __init__(self, message: str, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report
