"""What an adapter must do: three small Protocols, and the plain values that cross them.

An engine adapter finds its engine and puts 8-bit layers into it; what it returns, the attached
engine, takes weights and gives them back.  A trainer adapter says what its own launcher needs.
Nothing here names an engine or a trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch

from flashrl.core.launchers import Launcher
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.core.schemes import QuantScheme
from flashrl.core.viability import Viability

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = [
    "AttachedEngine",
    "Capabilities",
    "EngineAdapter",
    "NamedTensors",
    "RolloutEngine",
    "TrainerAdapter",
    "Viability",
    "WeightInfo",
]

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Checkpoint names and their tensors, as ``model.named_parameters()`` yields them."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """What an attached engine can do; asked here, never probed.

    Args:
        schemes: Names of the schemes it can run.
        exact_log_probs: Sampling parameters under which the log-probability it reports is that of
            the distribution sampled, as field names of :class:`SamplingParams`.
        generates: It is a :class:`RolloutEngine`.
        static_scales: It takes a profile's static scales.
        smoothing: It takes a profile's smoothing factors.
        mixture_of_experts: It quantizes experts.
        quantized_pushes: It takes weights that the sender quantized, ``X.weight`` in 8 bit and
            ``X.weight_scale``, in any order.
        detaches: :meth:`AttachedEngine.detach` gives the 16-bit engine back.
    """

    schemes: tuple[str, ...]
    exact_log_probs: frozenset[str]
    generates: bool = False
    static_scales: bool = False
    smoothing: bool = False
    mixture_of_experts: bool = False
    quantized_pushes: bool = False
    detaches: bool = False


@attrs.frozen(kw_only=True)
class WeightInfo:
    """One tensor that the engine expects, under its checkpoint name.

    Args:
        shape: The whole tensor's shape, not a rank's slice.
        dtype: What it is stored in: the scheme's 8-bit type, or the engine's own.
        scheme: How it is quantized, or None.
        num_input_shards: Slices along the input axis that are quantized apart, as tensor
            parallelism does; 1 without it.
        aliases: Other names of the same storage, such as a tied ``lm_head.weight``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: QuantScheme | None = None
    num_input_shards: int = 1
    aliases: tuple[str, ...] = ()


@runtime_checkable
class AttachedEngine(Protocol):
    """A running engine whose linear layers are 8-bit."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def weights(self) -> Mapping[str, WeightInfo]:
        """Every tensor an update must bring, by checkpoint name."""
        ...

    def update_weights(self, named_tensors: NamedTensors, *, version: int | None) -> None:
        """Take some or all of the weights, in place.

        Args:
            named_tensors: Tensors whose names and shapes :meth:`weights` lists, in any order; the
                caller may overwrite each as soon as the next is asked for.  16- or 32-bit, and
                with :attr:`Capabilities.quantized_pushes` also 8-bit with their scales.
            version: The weight version they belong to.

        Raises:
            WeightUpdateError: Some tensors were refused, after all others were loaded; each
                refused one is as it was.
            EngineStateError: The engine cannot take weights now.
        """
        ...

    def read_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors as the engine holds them, dequantized to float32, on the CPU."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Plain facts for people: kernels, layers, bytes."""
        ...

    def detach(self) -> None:
        """Give the engine back in 16 bit, with the newest weights it can restore.

        Raises:
            UnsupportedError: The engine cannot go back.
        """
        ...


@runtime_checkable
class RolloutEngine(AttachedEngine, Protocol):
    """An attached engine that generates through FlashRL too (``capabilities.generates``)."""

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        version: int | None = None,
    ) -> Rollout:
        """Sample one response for each prompt.

        Args:
            prompt_ids: Token ids of each prompt; no padding.
            params: How to sample.
            version: The weight version to stamp on the rollout.

        Raises:
            UnsupportedError: The log-probability under ``params`` would not be exact.
        """
        ...


@runtime_checkable
class EngineAdapter(Protocol):
    """Finds an engine and makes it 8-bit."""

    @property
    def name(self) -> str:
        """The entry point's name."""
        ...

    def check(self) -> Viability:
        """Look at what is installed; cheap, without a GPU, importing no framework."""
        ...

    def owns(self, engine: object) -> bool:
        """Whether ``engine`` is this adapter's; imports nothing."""
        ...

    def launch_args(
        self, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> Mapping[str, Any]:
        """Keyword arguments that start the engine 8-bit, so that 16-bit weights never exist.

        Raises:
            UnsupportedError: The engine cannot be started so; the message says how to attach.
        """
        ...

    def launch(
        self, checkpoint: Path, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AbstractContextManager[Any]:
        """Start a small engine on a checkpoint folder; it ends with the block.

        :meth:`attach` makes a session of it.  For checks and tests: an engine with settings of
        choice is started by its own API.
        """
        ...

    def attach(
        self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None
    ) -> AttachedEngine:
        """Make a running engine 8-bit in place.

        Raises:
            SchemeError: The scheme does not fit a layer, which the message names.
            UnsupportedError: The engine cannot change any more; the message says how to start it.
        """
        ...


@runtime_checkable
class TrainerAdapter(Protocol):
    """Teaches a trainer's own launcher to run 8-bit rollouts."""

    @property
    def name(self) -> str:
        """The entry point's name."""
        ...

    @property
    def launcher(self) -> Launcher:
        """How the trainer is started, and how it spells arguments."""
        ...

    def check(self) -> Viability:
        """Look at what is installed; cheap, importing no framework."""
        ...

    def overrides(self, scheme: QuantScheme, *, correction: str) -> Mapping[str, Any]:
        """What the trainer's own launcher takes for a scheme and a correction.

        Args:
            scheme: How rollouts are quantized.
            correction: A name that :func:`flashrl.trainers.corrections.find` knows.

        Returns:
            Keys as the launcher spells them, and their values; beside FLASHRL_CONFIG, which
            ``flashrl run`` sets.

        Raises:
            UnknownNameError: No correction has that name.
            UnsupportedError: The trainer cannot do it exactly; the message says what it can.
        """
        ...

    def install(self) -> None:
        """Add metrics, guards and presets to the trainer in this process; idempotent."""
        ...

    def uninstall(self) -> None:
        """Undo :meth:`install`."""
        ...
