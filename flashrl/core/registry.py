"""Adapters, found by entry point: ours and a stranger's the same way.

Metadata is read on the first look-up, not at import.  An adapter that cannot be loaded is kept with
its reason, so that ``flashrl doctor`` can show it.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable
from typing import Any

import attrs
import entrypoints

from flashrl.errors import AdapterError, MissingDependencyError, UnknownNameError

__all__ = ["ENGINES", "TRAINERS", "Registration", "get_adapter", "list_adapters"]

ENGINES = "flashrl.engines"
TRAINERS = "flashrl.trainers"

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Registration:
    """An adapter as its distribution registered it.

    Args:
        name: The entry point's name.
        group: ``"flashrl.engines"`` or ``"flashrl.trainers"``.
        distribution: Name and version of the distribution that registered it.
        target: ``module:object``.
        adapter: An instance, or None if it could not be loaded.
        error: Why it could not be loaded; empty otherwise.
    """

    name: str
    group: str
    distribution: str
    target: str
    adapter: Any = None
    error: str = ""


def list_adapters(group: str) -> tuple[Registration, ...]:
    """Every adapter registered in a group, broken ones included, by name.

    Raises:
        AdapterError: Two distributions registered the same name.
    """
    return _load_group(group)


def get_adapter(group: str, name: str) -> Any:
    """The adapter of that name.

    Raises:
        UnknownNameError: No such adapter; the message lists the known ones.
        MissingDependencyError: It is registered, and could not be loaded.
        AdapterError: Two distributions registered the same name.
    """
    registered = {r.name: r for r in list_adapters(group)}
    if name not in registered:
        close = difflib.get_close_matches(name, registered, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        known = ", ".join(registered) or "none"
        raise UnknownNameError(f"no adapter {name!r} in {group}{hint}; known: {known}")
    found = registered[name]
    if found.adapter is None:
        raise MissingDependencyError(
            f"adapter {name!r} of {found.distribution} could not be loaded: {found.error}"
        )
    return found.adapter


@functools.cache
def _load_group(group: str) -> tuple[Registration, ...]:
    return tuple(_load(group, entry) for entry in _unique(entrypoints.get_group_all(group)))


def _unique(entries: Iterable[Any]) -> list[Any]:
    """Entry points by name; one that an installation lists twice counts once."""
    by_name: dict[str, Any] = {}
    for entry in entries:
        known = by_name.setdefault(entry.name, entry)
        same = (known.module_name, known.object_name) == (entry.module_name, entry.object_name)
        if not (same and _owner(known).split(" ")[0] == _owner(entry).split(" ")[0]):
            raise AdapterError(
                f"adapter name {entry.name!r} is registered twice: by {_owner(known)} "
                f"({_target(known)}) and by {_owner(entry)} ({_target(entry)}); uninstall one"
            )
    return [by_name[name] for name in sorted(by_name)]


def _load(group: str, entry: Any) -> Registration:
    adapter, error = None, ""
    try:
        adapter = entry.load()()
    except Exception as exception:  # a stranger's plugin may fail in any way; doctor shows it
        error = f"{type(exception).__name__}: {exception}"
        logger.debug("adapter %s of %s is broken", entry.name, _owner(entry), exc_info=True)
    return Registration(
        name=entry.name,
        group=group,
        distribution=_owner(entry),
        target=_target(entry),
        adapter=adapter,
        error=error,
    )


def _owner(entry: Any) -> str:
    return f"{entry.distro.name} {entry.distro.version}" if entry.distro else "an unnamed source"


def _target(entry: Any) -> str:
    return f"{entry.module_name}:{entry.object_name}"
