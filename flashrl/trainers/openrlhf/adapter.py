"""The adapter: what OpenRLHF's own launcher takes, and what is added to its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashrl.core.launchers import DashSyntax, Launcher
from flashrl.core.viability import Viability

if TYPE_CHECKING:
    from flashrl.core.schemes import QuantScheme

__all__ = ["OpenRLHFAdapter"]


class OpenRLHFAdapter:
    """OpenRLHF, which has no plug-ins: ``python -m flashrl.trainers.openrlhf`` starts its trainer.

    Started by its own command, with FLASHRL_CONFIG set, it has 8-bit rollouts and their guards;
    metrics and the corrections that it lacks come with ours.
    """

    name = "openrlhf"
    launcher = Launcher(command=("-m", "flashrl.trainers.openrlhf"), syntax=DashSyntax(flags=True))

    def check(self) -> Viability:
        """Whether OpenRLHF is installed, in a version that is known."""
        return Viability.of_distribution(
            "openrlhf", oldest="0.11", flaw="spells its options in another way"
        )

    def overrides(self, scheme: QuantScheme, *, correction: str) -> Mapping[str, Any]:
        """Arguments of ``openrlhf.cli.train_ppo_ray``, without their dashes.

        Args:
            scheme: How rollouts are quantized; FLASHRL_CONFIG says it to the engine.
            correction: What corrects for it.

        Raises:
            UnknownNameError: No correction has that name.
            UnsupportedError: OpenRLHF's loss cannot do it exactly.
        """
        from flashrl.trainers.openrlhf.options import write_options

        return write_options(correction)

    def install(self) -> None:
        """Add guards, metrics and corrections to OpenRLHF in this process; idempotent."""
        from flashrl.trainers.openrlhf.plugin import install

        install()

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        from flashrl.trainers.openrlhf.plugin import uninstall

        uninstall()
