"""The pure part: torch and attrs, never an engine or a trainer."""

from __future__ import annotations

import logging

# Silent until someone asks.  Here, because a bare ``import flashrl`` should not pay for logging.
logging.getLogger("flashrl").addHandler(logging.NullHandler())
