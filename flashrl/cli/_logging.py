"""Where the log goes; only the command line decides that, and for our logger alone."""

from __future__ import annotations

import logging

from flashrl.core.environment import EnvironmentOptions
from flashrl.errors import ConfigError

__all__ = ["configure_logging"]

_NAME = "flashrl.cli"  # marks our handlers, so that a second call replaces them


def configure_logging(options: EnvironmentOptions) -> None:
    """Send the package's log to stderr, and to a file if one is named; the root is left alone.

    Args:
        options: ``FLASHRL_LOGGING_LEVEL`` and ``FLASHRL_LOGGING_FILE``.

    Raises:
        ConfigError: The file cannot be written.
    """
    logger = logging.getLogger("flashrl")
    for handler in [handler for handler in logger.handlers if handler.name == _NAME]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if options.logging_file is not None:
        try:
            handlers.append(logging.FileHandler(options.logging_file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"FLASHRL_LOGGING_FILE={str(options.logging_file)!r} cannot be written: {error}"
            ) from error
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in handlers:
        handler.set_name(_NAME)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(options.logging_level)
