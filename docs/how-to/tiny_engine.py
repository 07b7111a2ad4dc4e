"""An inference engine as small as one can be, its adapter, and the suite that proves it.

Run it: ``pytest docs/how-to/tiny_engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flashrl.core.interfaces import Capabilities, NamedTensors, Viability, WeightInfo
from flashrl.core.log_probs.assemble import assemble_rollout
from flashrl.core.log_probs.sampling import Sample, sample
from flashrl.core.names import LayerRules
from flashrl.core.profiles import Profile
from flashrl.core.quantize import dequantize, quantize_into
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.core.schemes import PRESETS, QuantScheme, get_scheme
from flashrl.core.updates import load_each
from flashrl.errors import NonFiniteError, UnsupportedError
from flashrl.session import Session
from flashrl.testing import EngineConformance
from flashrl.testing.conformance import OpenSession


class TinyEngine:
    """A model, and a loop that draws tokens; it computes everything anew for every token."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def draw(
        self, prompt: Sequence[int], params: SamplingParams, generator: torch.Generator
    ) -> list[Sample]:
        """Draw tokens until one of them stops, or there are enough."""
        ids: list[int] = list(prompt)
        drawn: list[Sample] = []
        while len(drawn) < params.max_tokens and not (drawn and ids[-1] in params.stop_token_ids):
            logits = self.model(torch.tensor([ids])).logits[:, -1]
            drawn.append(sample(logits, params, generator))
            ids.append(int(drawn[-1].token_ids))
        return drawn


class EightBitLinear(nn.Module):
    """A linear layer whose weight exists in 8 bit only."""

    def __init__(self, linear: nn.Linear, scheme: QuantScheme) -> None:
        super().__init__()
        self.scheme, self.bias = scheme, linear.bias
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=scheme.dtype))
        self.register_buffer("scale", torch.empty(scheme.scale_shape(linear.weight.shape)))
        self.load(linear.weight.detach(), name="weight")

    def load(self, weight: Tensor, *, name: str) -> None:
        """Quantize a 16-bit weight into place; this is all that an update does."""
        quantize_into(weight, self.weight, self.scale, scheme=self.scheme, name=name)

    def read(self) -> Tensor:
        """The weight that the 8-bit values stand for."""
        return dequantize(self.weight, self.scale, scheme=self.scheme)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; a real engine calls its 8-bit kernel here."""
        return nn.functional.linear(x, self.read(), self.bias)


class AttachedTinyEngine:
    """What FlashRL asks of a running engine whose linear layers are 8-bit."""

    capabilities = Capabilities(
        schemes=tuple(PRESETS),
        exact_log_probs=frozenset({"temperature", "top_k", "top_p", "min_p", "logit_bias"}),
        generates=True,
    )

    def __init__(self, engine: TinyEngine, scheme: QuantScheme) -> None:
        self._engine = engine
        rules = LayerRules.from_scheme(scheme)
        self._linears: dict[str, EightBitLinear] = {}
        for name, module in list(engine.model.named_modules()):
            if isinstance(module, nn.Linear) and rules.matches(name):
                linear = EightBitLinear(module, scheme)
                engine.model.set_submodule(name, linear)
                self._linears[f"{name}.weight"] = linear
        self._kept = {name: p.data for name, p in engine.model.named_parameters()}

    def weights(self) -> Mapping[str, WeightInfo]:
        """Every tensor that an update must bring."""
        return {
            **{
                name: WeightInfo(shape=tuple(t.shape), dtype=t.dtype)
                for name, t in self._kept.items()
            },
            **{
                name: WeightInfo(
                    shape=tuple(linear.weight.shape),
                    dtype=linear.scheme.dtype,
                    scheme=linear.scheme,
                )
                for name, linear in self._linears.items()
            },
        }

    def update_weights(self, named_tensors: NamedTensors, *, version: int | None = None) -> None:
        """Take weights; names and shapes have been checked, the values have not."""
        load_each(named_tensors, self._load)

    def _load(self, name: str, tensor: Tensor) -> None:
        if name in self._linears:
            self._linears[name].load(tensor, name=name)
        elif torch.isfinite(tensor).all():
            self._kept[name].copy_(tensor)
        else:
            raise NonFiniteError(f"{name} holds NaN or infinity; nothing was written")

    def read_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Give weights back, for the proof."""
        for name in names:
            linear = self._linears.get(name)
            yield name, self._kept[name].clone() if linear is None else linear.read()

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        version: int | None = None,
    ) -> Rollout:
        """Sample, and keep what each token was worth."""
        if params.penalizes:
            raise UnsupportedError("the tiny engine knows no penalties; leave them off")
        generator = torch.Generator()
        if params.seed is not None:
            generator.manual_seed(params.seed)
        else:
            generator.seed()
        drawn = [self._engine.draw(prompt, params, generator) for prompt in prompt_ids]
        return assemble_rollout(
            [[int(token.token_ids) for token in row] for row in drawn],
            [[float(token.log_probs) for token in row] for row in drawn],
            log_mass=[[float(token.log_mass) for token in row] for row in drawn],
            version=version,
            allow_zeros=params.top_k == 1,
        )

    def describe(self) -> Mapping[str, Any]:
        """Facts for people."""
        return {"quantized_weights": len(self._linears), "kept_weights": len(self._kept)}

    def detach(self) -> None:
        """Not here: ``capabilities.detaches`` is False."""
        raise UnsupportedError("the tiny engine cannot go back to 16 bit; start another one")


class TinyAdapter:
    """Finds a :class:`TinyEngine` and makes it 8-bit."""

    name = "tiny"

    def check(self) -> Viability:
        """Look at what is installed; import nothing heavy."""
        return Viability(ok=True)

    def owns(self, engine: object) -> bool:
        """Tell by the class's name, so that asking imports nothing."""
        return type(engine).__name__ == "TinyEngine"

    def launch_args(
        self, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Mapping[str, Any]:
        """Not how this engine starts."""
        raise UnsupportedError("start TinyEngine(checkpoint), then call flashrl.attach")

    @contextmanager
    def launch(
        self, checkpoint: Path, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Iterator[TinyEngine]:
        """Start an engine for a check or a test."""
        yield TinyEngine(checkpoint)

    def attach(
        self, engine: TinyEngine, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AttachedTinyEngine:
        """Make a running engine 8-bit, in place."""
        if profile is not None:
            raise UnsupportedError("the tiny engine takes no profile; leave it out")
        return AttachedTinyEngine(engine, scheme)


class TestTinyEngine(EngineConformance):
    """Every test of the suite, for two schemes."""

    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls) -> OpenSession:
        """How to start an engine and attach to it."""

        @contextmanager
        def open_session(checkpoint: Path, scheme: str) -> Iterator[Session]:
            adapter = TinyAdapter()
            with adapter.launch(checkpoint, get_scheme(scheme)) as engine:
                attached = adapter.attach(engine, get_scheme(scheme))
                yield Session(attached, get_scheme(scheme), engine_name=adapter.name)

        return open_session
