"""A Hugging Face model whose linears are 8-bit: it takes 16-bit weights, and generates."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flashrl.core.interfaces import Capabilities, NamedTensors, WeightInfo
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.core.updates import load_each
from flashrl.engines.huggingface.conversion import Conversion
from flashrl.engines.huggingface.generation import generate
from flashrl.errors import EngineStateError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["AttachedModel"]

CAPABILITIES = Capabilities(
    schemes=tuple(PRESETS),
    exact_log_probs=frozenset(
        {
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
        }
    ),
    generates=True,
    smoothing=True,
    static_scales=True,
    mixture_of_experts=True,
    quantized_pushes=True,
    detaches=True,
)


class AttachedModel:
    """The embedded engine; made by :class:`HuggingFaceAdapter`.

    Args:
        model: A causal language model; its linears are replaced in place.
        scheme: How they are stored.
        profile: Smoothing factors and static scales, applied to whatever is loaded.
    """

    capabilities = CAPABILITIES

    def __init__(
        self, model: nn.Module, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> None:
        self._model = model
        self._busy = threading.Lock()
        with torch.no_grad():
            self._conversion = Conversion(model, scheme, profile=profile)

    def weights(self) -> Mapping[str, WeightInfo]:
        """Every tensor an update must bring, by checkpoint name."""
        return self._conversion.infos

    def update_weights(self, named_tensors: NamedTensors, *, version: int | None = None) -> None:
        """Quantize 16-bit weights into place; see :class:`AttachedEngine`."""
        with self._exclusively("take weights"), torch.no_grad():
            load_each(named_tensors, self._conversion.load)

    def read_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as the model holds them, dequantized to float32, on the CPU."""
        for name in names:
            yield name, self._conversion.read(name).cpu()

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        version: int | None = None,
    ) -> Rollout:
        """Sample one response for each prompt with transformers' own ``generate``."""
        with self._exclusively("generate"):
            return generate(self._model, prompt_ids, params, version=version)

    def describe(self) -> dict[str, Any]:
        """Kernels, layers and bytes."""
        linears = list(self._conversion.linears.values())
        return {
            "model": type(self._model).__name__,
            "device": str(next(self._model.parameters()).device),
            "products": dict(Counter(linear.product.name for linear in linears)),
            "quantized_weights": len(linears),
            "kept_weights": len(self._conversion.infos) - len(linears),
            "bytes": sum(p.numel() * p.element_size() for p in self._model.parameters()),
        }

    def detach(self) -> None:
        """Put 16-bit linears back.

        They hold what they held before :func:`flashrl.attach`, or, where an update has come since,
        its dequantized values.
        """
        with self._exclusively("detach"), torch.no_grad():
            self._conversion.undo()

    @contextmanager
    def _exclusively(self, action: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise EngineStateError(
                f"the model is busy, so it cannot {action} now; wait until the other call returns"
            )
        try:
            yield
        finally:
            self._busy.release()
