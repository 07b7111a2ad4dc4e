"""FlashRL: reinforcement-learning rollouts in 8 bit, with the training maths kept exact."""

from __future__ import annotations

TYPE_CHECKING = False  # typing would be most of what the import costs
if TYPE_CHECKING:
    from typing import Any

    from flashrl.session import Session, attach, launch, launch_args

__all__ = ["Session", "__version__", "attach", "launch", "launch_args"]
__version__ = "0.1.0"

_SESSION_NAMES = frozenset({"Session", "attach", "launch", "launch_args"})
_SUBMODULES = frozenset({"cli", "core", "engines", "errors", "session", "testing", "trainers"})


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that ``import flashrl`` costs nothing."""
    import importlib

    if name in _SESSION_NAMES:
        return getattr(importlib.import_module("flashrl.session"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"flashrl.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SESSION_NAMES, *_SUBMODULES})
