"""The adapter: what a TRL script takes, and what is added to TRL's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashrl.core.launchers import DashSyntax, Launcher
from flashrl.core.viability import Viability

if TYPE_CHECKING:
    from flashrl.core.schemes import QuantScheme

__all__ = ["TRLAdapter"]


class TRLAdapter:
    """TRL, whose trainers run in the user's own script.

    With ``use_vllm`` in colocate mode vLLM runs there too, and brings FlashRL into the process.
    """

    name = "trl"
    launcher = Launcher(syntax=DashSyntax())

    def check(self) -> Viability:
        """Whether TRL is installed, in a version that is known."""
        return Viability.of_distribution("trl", oldest="1.16", flaw="corrects in another way")

    def overrides(self, scheme: QuantScheme, *, correction: str) -> Mapping[str, Any]:
        """Fields of ``GRPOConfig``; a script that parses them takes them as arguments.

        Args:
            scheme: How rollouts are quantized; FLASHRL_CONFIG says it to the engine.
            correction: What corrects for it.

        Raises:
            UnknownNameError: No correction has that name.
            UnsupportedError: No field of TRL's says it; the message names the trainer that does.
        """
        from flashrl.trainers.trl.options import write_options

        return write_options(correction)

    def install(self) -> None:
        """Add guards and metrics to TRL's trainer in this process; idempotent."""
        from flashrl.trainers.trl.plugin import install

        install()

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        from flashrl.trainers.trl.plugin import uninstall

        uninstall()
