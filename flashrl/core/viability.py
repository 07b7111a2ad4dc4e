"""Whether an adapter can work here; light enough for a command that imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

__all__ = ["Viability"]


@attrs.frozen(kw_only=True)
class Viability:
    """Whether an adapter can work here.

    Args:
        ok: True when everything it needs is installed.
        reason: Why not, and what to install; empty when ``ok``.
        versions: Version of each distribution that was looked at.
    """

    ok: bool
    reason: str = ""
    versions: Mapping[str, str] = MappingProxyType({})
