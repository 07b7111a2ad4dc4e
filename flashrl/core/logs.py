"""Where our log goes: the package is silent until a command or a variable asks, and then alone.

Handlers go on the logger ``flashrl`` and nowhere else: neither the root logger nor an engine's is
touched.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from flashrl.core.environment import EnvironmentOptions
from flashrl.errors import ConfigError

__all__ = ["configure_logging", "follow_environment"]

_NAME = "flashrl.logs"  # marks our handlers, so that a second call replaces them
_VARIABLES = ("FLASHRL_LOGGING_LEVEL", "FLASHRL_LOGGING_FILE")
_logger = logging.getLogger("flashrl")


def configure_logging(options: EnvironmentOptions, *, as_guest: bool = False) -> None:
    """Send the package's log to stderr, and to a file if one is named.

    Args:
        options: ``FLASHRL_LOGGING_LEVEL`` and ``FLASHRL_LOGGING_FILE``.
        as_guest: The process is not ours: where others have handlers that take our records,
            stderr is left to those.

    Raises:
        ConfigError: The file cannot be written; the log is as it was.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if as_guest:
        handlers[0].addFilter(_is_unheard)
    if options.logging_file is not None:
        try:
            handlers.append(logging.FileHandler(options.logging_file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"FLASHRL_LOGGING_FILE={str(options.logging_file)!r} cannot be written: {error}"
            ) from error
    for handler in [handler for handler in _logger.handlers if handler.name == _NAME]:
        _logger.removeHandler(handler)
        handler.close()
    # Processes of an engine share a file.
    formatter = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    for handler in handlers:
        handler.set_name(_NAME)
        handler.setFormatter(formatter)
        _logger.addHandler(handler)
    _logger.setLevel(options.logging_level)


def follow_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Do as the two variables say in a process that an engine started; nothing without them.

    Idempotent, and nothing where :func:`configure_logging` was called before.

    Raises:
        ConfigError: A value is not allowed, or the file cannot be written.
    """
    asked = any(environ.get(name, "").strip() for name in _VARIABLES)
    if asked and not any(handler.name == _NAME for handler in _logger.handlers):
        configure_logging(EnvironmentOptions.from_environ(environ), as_guest=True)


def _is_unheard(record: logging.LogRecord) -> bool:
    """Whether no handler but ours takes a record."""
    others = [handler for handler in _logger.handlers if handler.name != _NAME]
    if _logger.propagate:
        others += logging.getLogger().handlers
    return all(isinstance(handler, logging.NullHandler) for handler in others)
