"""Import stub."""

from . import functional  # noqa: F401
