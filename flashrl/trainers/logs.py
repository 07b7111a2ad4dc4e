"""Warnings that stay audible in processes that a trainer starts.

The package is silent until asked, and in these processes nobody asks: no handler is set up, and
importing vLLM's server raises the root logger to ERROR.  A guard that nobody hears would be none,
so our logger gets a handler of its own there.
"""

from __future__ import annotations

import logging
import sys

from flashrl.core.logs import follow_environment

__all__ = ["fall_silent", "speak"]

_logger = logging.getLogger("flashrl")
_handlers: list[logging.Handler] = []


def speak() -> None:
    """Send our warnings to stderr whatever happens to the root logger; idempotent.

    FLASHRL_LOGGING_LEVEL and FLASHRL_LOGGING_FILE go first: they say from which level on, and
    whether to a file too.
    """
    follow_environment()
    if any(not isinstance(handler, logging.NullHandler) for handler in _logger.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.WARNING)
    _logger.propagate = False
    _handlers.append(handler)


def fall_silent() -> None:
    """Undo :func:`speak`."""
    while _handlers:
        _logger.removeHandler(_handlers.pop())
        _logger.setLevel(logging.NOTSET)
        _logger.propagate = True
