"""Changes to a framework, made when it imports the module in question, and undone.

A trainer starts many processes, and most of them need little of it.  So nothing is imported here:
a module is changed right after somebody else has imported it, or at once if that has happened.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import attrs

from flashrl.trainers import logs

__all__ = ["Patches", "Plugin"]

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Patches(importlib.abc.MetaPathFinder):
    """Functions that change modules of a framework.

    Args:
        changes: Module → function that is called with this object and the module.

    Example:
        >>> import statistics
        >>> def change(patches, module):
        ...     patches.replace(module, "mean", lambda values: 42)
        >>> patches = Patches({"statistics": change})
        >>> patches.install(); statistics.mean([1]); patches.uninstall(); statistics.mean([1])
        42
        1
    """

    changes: Mapping[str, Callable[[Patches, Any], None]]
    _undo: list[tuple[Any, str, Any]] = attrs.field(factory=list, init=False)
    _installed: bool = attrs.field(default=False, init=False)
    _searching: set[str] = attrs.field(factory=set, init=False)

    def install(self) -> None:
        """Change what is imported already, and wait for the rest; idempotent."""
        if self._installed:
            return
        self._installed = True
        sys.meta_path.insert(0, self)
        for name in self.changes:
            if name in sys.modules:
                self.apply(sys.modules[name])

    def uninstall(self) -> None:
        """Put everything back; idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._restore(0)
        self._installed = False

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, and remember what it was.

        Raises:
            AttributeError: There is no such attribute.
        """
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def apply(self, module: ModuleType) -> None:
        """Run the function of a module: all of it or nothing.

        A failure is logged, for an import must not break.
        """
        change = self.changes[module.__name__]
        before = len(self._undo)
        try:
            change(self, module)
            logger.info("%s is changed: %s", module.__name__, change.__doc__)
        except Exception:
            self._restore(before)
            logger.exception("%s is not as expected; not done: %s", module.__name__, change.__doc__)

    def _restore(self, before: int) -> None:
        while len(self._undo) > before:
            setattr(*self._undo.pop())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the modules by the other finders, and come back after its execution."""
        if fullname not in self.changes or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


@attrs.define(eq=False)
class Plugin(Patches):
    """Changes to a trainer; in a process that imports it our warnings are heard.

    An engine that was started without it has a log of its own, which is left alone.
    """

    @property
    def _trainers(self) -> set[str]:
        return {name.partition(".")[0] for name in self.changes} - {"vllm", "sglang"}

    def install(self) -> None:
        """Change the trainer in this process, now or when it is imported; idempotent."""
        if not self._trainers.isdisjoint(sys.modules):
            logs.speak()
        super().install()

    def apply(self, module: ModuleType) -> None:
        """As :meth:`Patches.apply`."""
        if module.__name__.partition(".")[0] in self._trainers:
            logs.speak()
        super().apply(module)

    def uninstall(self) -> None:
        """Put the trainer's own functions back."""
        super().uninstall()
        logs.fall_silent()


@attrs.define(eq=False)
class _Loader(importlib.abc.Loader):
    """A module's own loader, and then the function."""

    loader: importlib.abc.Loader
    patches: Patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.patches.apply(module)
