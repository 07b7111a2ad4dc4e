"""The adapter: what verl's own launcher takes, and what is added to verl in its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from flashrl.core.launchers import HydraSyntax, Launcher
from flashrl.core.viability import Viability

if TYPE_CHECKING:
    from flashrl.core.schemes import QuantScheme

__all__ = ["VerlAdapter"]

_OLDEST = (0, 9)


class VerlAdapter:
    """verl.  It finds us too: as a plug-in of group ``verl.plugins``."""

    name = "verl"
    launcher = Launcher(command=("-m", "verl.trainer.main_ppo"), syntax=HydraSyntax())

    def check(self) -> Viability:
        """Whether verl is installed, in a version that is known, and loads its plug-ins."""
        try:
            version = metadata.version("verl")
        except metadata.PackageNotFoundError:
            return Viability(ok=False, reason="verl is not installed; pip install 'flashrl[verl]'")
        versions = {"verl": version}
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None or tuple(map(int, found.groups())) < _OLDEST:
            reason = f"verl {version} has no plug-ins; 0.9 or newer is needed"
            return Viability(ok=False, reason=reason, versions=versions)
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
        if policy.lower() != "auto" and "flashrl" not in map(str.strip, policy.split(",")):
            reason = (
                f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading flashrl's guards and "
                "metrics; unset it, or add flashrl to it"
            )
            return Viability(ok=False, reason=reason, versions=versions)
        return Viability(ok=True, versions=versions)

    def overrides(self, scheme: QuantScheme, *, correction: str) -> Mapping[str, Any]:
        """Hydra keys of ``verl.trainer.main_ppo``.

        Args:
            scheme: How rollouts are quantized; FLASHRL_CONFIG says it to the engine.
            correction: What corrects for it.

        Raises:
            UnknownNameError: No correction has that name.
        """
        from flashrl.trainers.verl.options import write_options

        return write_options(correction)

    def install(self) -> None:
        """Add guards, metrics and corrections to verl in this process; idempotent."""
        from flashrl.trainers.verl.plugin import install

        install()

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        from flashrl.trainers.verl.plugin import uninstall

        uninstall()
