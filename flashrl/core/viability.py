"""Whether an adapter can work here; light enough for a command that imports no framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
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

    @classmethod
    def of_distribution(
        cls, name: str, *, oldest: str = "0", flaw: str = "is too old", extra: str | None = None
    ) -> Viability:
        """Whether a distribution is installed, and new enough.

        Args:
            name: As pip knows it.
            oldest: The first version that will do; a pre-release of it does.
            flaw: What is the matter with an older one, for people.
            extra: Ours that installs it; ``name`` by default.

        Example:
            >>> Viability.of_distribution("no-such-thing").reason
            "no-such-thing is not installed; pip install 'flashrl[no-such-thing]'"
            >>> Viability.of_distribution("attrs", oldest="99.0").ok
            False
        """
        install = f"pip install 'flashrl[{extra or name}]'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return cls(ok=False, reason=f"{name} is not installed; {install}")
        versions = {name: version}
        if _numbers(version) < _numbers(oldest):
            reason = f"{name} {version} {flaw}; {oldest} or newer is needed"
            return cls(ok=False, reason=reason, versions=versions)
        return cls(ok=True, versions=versions)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, ``(1, 16)`` of ``1.16rc1``; nothing if it does not start so."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
