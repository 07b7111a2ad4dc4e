"""The adapter: knows SGLang's engine when it sees one, and how to start it 8-bit."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.core.viability import Viability
from flashrl.errors import MissingDependencyError, SchemeError, UnsupportedError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile
    from flashrl.engines.sglang.attached import AttachedSGLang

__all__ = ["SGLangAdapter"]


class SGLangAdapter:
    """Makes ``sgl.Engine`` 8-bit, running or from its start."""

    name = "sglang"

    def check(self) -> Viability:
        """Whether a version of SGLang is installed that is known here."""
        return Viability.of_distribution("sglang", oldest="0.5.12")

    def owns(self, engine: object) -> bool:
        """Whether it is an ``sgl.Engine``; told by its class, so nothing is imported."""
        return any(
            kind.__name__ == "Engine" and kind.__module__.split(".")[0] == "sglang"
            for kind in type(engine).__mro__
        )

    def launch_args(
        self, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Mapping[str, Any]:
        """Keyword arguments of ``sgl.Engine`` that start it 8-bit.

        A preset has a name in SGLang; any other scheme travels in the model's configuration, and
        so does the path of a profile, which is written to a temporary file for the schedulers of
        this machine.

        Raises:
            UnsupportedError: The scheme asks for what the engine has not.
            SchemeError: It wants static scales, and there is no profile.
        """
        _check_scheme(scheme, profile)
        if not scheme.quantized:
            return {}
        if profile is None and PRESETS.get(scheme.name) == scheme:
            return {"quantization": f"flashrl_{scheme.name}"}
        config = {"quant_method": "flashrl", "scheme": attrs.asdict(scheme)}
        if profile is not None:
            config["profile"] = _write(profile)
        override = json.dumps({"quantization_config": config})
        return {"quantization": "flashrl", "json_model_override_args": override}

    @contextmanager
    def launch(
        self, checkpoint: Path, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Iterator[Any]:
        """Start a small engine on a checkpoint folder, 8-bit from the start.

        Raises:
            MissingDependencyError: sglang is not installed, or too old.
            UnsupportedError: As :meth:`launch_args`.
        """
        arguments = self.launch_args(scheme, profile=profile)
        found = self.check()
        if not found.ok:
            raise MissingDependencyError(found.reason)
        import torch

        place: dict[str, Any] = {}
        if not torch.cuda.is_available():
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            place = {"device": "cpu", "attention_backend": "torch_native", "sleep_on_idle": True}
        import sglang

        from flashrl.engines.sglang import compat

        engine = sglang.Engine(
            model_path=str(checkpoint),
            **place,
            disable_cuda_graph=True,
            sampling_backend="pytorch",
            grammar_backend="none",
            max_total_tokens=8192,
            max_running_requests=64,
            skip_server_warmup=True,
            log_level="error",
            **arguments,
        )
        try:
            yield engine
        finally:
            compat.shut_down(engine)

    def attach(
        self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AttachedSGLang:
        """Make a running engine 8-bit in place, or take over one that was started 8-bit.

        Raises:
            SchemeError: The scheme fits no layer, or not one that the message names; or it wants
                static scales that no profile has.
            ProfileError: The profile does not fit the model.
            UnsupportedError: The engine cannot change any more; the message says how to start it.
        """
        from flashrl.engines.sglang.attached import AttachedSGLang

        _check_scheme(scheme, profile)
        return AttachedSGLang(engine, scheme, profile=profile)


def _write(profile: Profile) -> str:
    """Write a profile where this machine's schedulers find it, until this process ends."""
    folder = tempfile.mkdtemp(prefix="flashrl-profile-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "profile.safetensors"
    profile.save(path)
    return str(path)


def _check_scheme(scheme: QuantScheme, profile: Profile | None) -> None:
    """Refuse what would otherwise be left out in silence."""
    faults = [
        fault
        for fault, asked in (
            ("pruning of dead neurons", scheme.prune_dead_neurons),
            ("an fp8 KV cache, which needs calibrated scales", scheme.kv_cache is not None),
        )
        if asked
    ]
    if faults:
        raise UnsupportedError(
            f"scheme {scheme.name!r} asks for {', and for '.join(faults)}; flashrl's SGLang engine "
            "has neither: leave it out"
        )
    if scheme.quantized and not scheme.dynamic and profile is None:
        raise SchemeError(
            f"scheme {scheme.name!r} has static scales (dynamic=False), which come from a profile; "
            "pass one, or a dynamic scheme"
        )
