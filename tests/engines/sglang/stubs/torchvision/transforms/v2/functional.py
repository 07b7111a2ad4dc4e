"""Import stub."""

from .. import InterpolationMode  # noqa: F401
from ..functional import __getattr__  # noqa: F401
