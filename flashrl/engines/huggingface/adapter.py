"""The adapter: knows a Hugging Face model when it sees one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashrl.core.viability import Viability
from flashrl.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from flashrl.core.profiles import Profile
    from flashrl.core.schemes import QuantScheme
    from flashrl.engines.huggingface.attached import AttachedModel

__all__ = ["HuggingFaceAdapter"]


class HuggingFaceAdapter:
    """Makes any causal language model of transformers an engine, on CPU or GPU."""

    name = "huggingface"

    def check(self) -> Viability:
        """Whether transformers is installed."""
        return Viability.of_distribution("transformers", extra="huggingface")

    def owns(self, engine: object) -> bool:
        """Whether it is a transformers model; told by its class, so nothing is imported."""
        return any(
            kind.__name__ == "PreTrainedModel" and kind.__module__.split(".")[0] == "transformers"
            for kind in type(engine).__mro__
        )

    def launch_args(
        self, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Mapping[str, Any]:
        """Not how this engine starts.

        Raises:
            UnsupportedError: Always; the message says what to do.
        """
        raise UnsupportedError(
            "the embedded engine is a model that is already loaded; load it with "
            "AutoModelForCausalLM.from_pretrained(...) and call flashrl.attach(model, "
            f"scheme={scheme.name!r})"
        )

    @contextmanager
    def launch(
        self, checkpoint: Path, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Iterator[Any]:
        """Load a checkpoint folder, in float32 on a CPU and in its own dtype on a GPU.

        Raises:
            MissingDependencyError: transformers is not installed.
        """
        found = self.check()
        if not found.ok:
            raise MissingDependencyError(found.reason)
        import torch
        from transformers import AutoModelForCausalLM

        cuda = torch.cuda.is_available()
        dtype = "auto" if cuda else torch.float32  # a CPU multiplies bfloat16 slowly
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        yield model.to("cuda") if cuda else model

    def attach(
        self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AttachedModel:
        """Replace the model's linears by 8-bit ones, in place.

        Raises:
            SchemeError: The scheme fits no layer of the model.
        """
        from flashrl.engines.huggingface.attached import AttachedModel

        return AttachedModel(engine, scheme, profile=profile)
