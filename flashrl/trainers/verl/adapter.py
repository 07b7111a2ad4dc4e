"""The adapter: what verl's own launcher takes, and what is added to verl in its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from flashrl.core.launchers import HydraSyntax, Launcher
from flashrl.core.viability import Viability

if TYPE_CHECKING:
    from flashrl.core.schemes import QuantScheme

__all__ = ["VerlAdapter"]


class VerlAdapter:
    """verl.  It finds us too: as a plug-in of group ``verl.plugins``."""

    name = "verl"
    launcher = Launcher(command=("-m", "verl.trainer.main_ppo"), syntax=HydraSyntax())

    def check(self) -> Viability:
        """Whether verl is installed, in a version that is known, and loads its plug-ins."""
        found = Viability.of_distribution("verl", oldest="0.9", flaw="has no plug-ins")
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
        names = [name.strip() for name in policy.split(",")]
        if found.ok and policy.lower() != "auto" and "flashrl" not in names:
            reason = (
                f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading flashrl's guards and "
                "metrics; unset it, or add flashrl to it"
            )
            return attrs.evolve(found, ok=False, reason=reason)
        return found

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
