"""``attach`` an engine, and hold the session through which weights, proof and rollouts pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashrl.core import registry
from flashrl.core.interfaces import (
    AttachedEngine,
    Capabilities,
    EngineAdapter,
    NamedTensors,
    RolloutEngine,
)
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.core.updates import UpdateLedger
from flashrl.core.updates.verify import VerifyReport, compare, compute_expected
from flashrl.errors import (
    AdapterError,
    ConfigError,
    EngineStateError,
    UnsupportedError,
    VerificationError,
    WeightUpdateError,
)

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["Session", "WeightUpdate", "attach", "launch", "launch_args"]

logger = logging.getLogger(__name__)


def attach(
    engine: object, scheme: str | QuantScheme = "int8", *, profile: Profile | None = None
) -> Session:
    """Make a running engine's linear layers 8-bit, in place.

    Args:
        engine: A running engine that an installed adapter owns.
        scheme: A preset's name or a scheme.
        profile: Smoothing factors and static scales.

    Returns:
        The session; as a context manager it detaches at the end.

    Raises:
        AdapterError: No adapter owns the engine; the message lists those there are.
        UnknownNameError: No such scheme.
        SchemeError: The scheme does not fit a layer, which the message names.
        UnsupportedError: The engine cannot change any more; the message says how to start it.
    """
    scheme = get_scheme(scheme)
    adapter = _find_adapter(engine)
    attached = adapter.attach(engine, scheme, profile=profile)
    logger.info("attached %s to %s", scheme.name, adapter.name)
    return Session(attached, scheme, engine_name=adapter.name, profile=profile)


def launch_args(
    engine: str, scheme: str | QuantScheme = "int8", *, profile: Profile | None = None
) -> Mapping[str, Any]:
    """Keyword arguments that start an engine 8-bit, so that 16-bit weights never exist.

    Args:
        engine: An adapter's name, such as ``"vllm"``.
        scheme: A preset's name or a scheme.
        profile: Smoothing factors and static scales.

    Returns:
        What the engine's own constructor takes.

    Raises:
        UnknownNameError: No such adapter or scheme.
        MissingDependencyError: The adapter's framework is not installed.
        UnsupportedError: The engine cannot be started so.
    """
    adapter: EngineAdapter = registry.get_adapter(registry.ENGINES, engine)
    return adapter.launch_args(get_scheme(scheme), profile=profile)


@contextmanager
def launch(
    engine: str,
    checkpoint: str | Path,
    scheme: str | QuantScheme = "int8",
    *,
    profile: Profile | None = None,
) -> Iterator[Session]:
    """Start a small engine on a checkpoint folder and attach to it; it ends with the block.

    For checks, tests and first steps.  An engine with settings of your choice is started by its
    own API, with :func:`launch_args` or followed by :func:`attach`.

    Args:
        engine: An adapter's name, such as ``"vllm"``.
        checkpoint: Folder with a config, safetensors and a tokenizer.
        scheme: A preset's name or a scheme.
        profile: Smoothing factors and static scales.

    Raises:
        UnknownNameError: No such adapter or scheme.
        MissingDependencyError: The adapter's framework is not installed.
        ConfigError: There is no such folder.
    """
    folder = Path(checkpoint)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no checkpoint folder: it holds no config.json")
    adapter: EngineAdapter = registry.get_adapter(registry.ENGINES, engine)
    with adapter.launch(folder, get_scheme(scheme), profile=profile) as running:
        yield attach(running, scheme, profile=profile)


def _find_adapter(engine: object) -> EngineAdapter:
    registered = registry.list_adapters(registry.ENGINES)
    for entry in registered:
        if entry.adapter is not None and entry.adapter.owns(engine):
            adapter: EngineAdapter = entry.adapter
            return adapter
    known = ", ".join(
        f"{entry.name} ({entry.error})" if entry.error else entry.name for entry in registered
    )
    kind = type(engine)
    raise AdapterError(
        f"no engine adapter owns a {kind.__module__}.{kind.__qualname__}; adapters: "
        f"{known or 'none'}. `flashrl doctor` shows what each one needs"
    )


class Session:
    """A running engine with 8-bit linear layers; made by :func:`attach`.

    Attributes:
        scheme: How its linear layers are stored.
        engine_name: The adapter's name.
        profile: Smoothing factors and static scales the engine applies, if any.
        version: Weight version of the newest complete update; 0 before the first; None while an
            update runs and after one that failed, when the weights are part old, part new.
    """

    def __init__(
        self,
        engine: AttachedEngine,
        scheme: QuantScheme,
        *,
        engine_name: str = "engine",
        profile: Profile | None = None,
    ) -> None:
        self._engine: AttachedEngine | None = engine
        self.scheme = scheme
        self.engine_name = engine_name
        self.profile = profile
        self.version: int | None = 0
        self._latest = 0

    @property
    def engine(self) -> AttachedEngine:
        """The attached engine.

        Raises:
            EngineStateError: The session is detached.
        """
        if self._engine is None:
            raise EngineStateError("the session is detached; call flashrl.attach again")
        return self._engine

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.engine.capabilities

    def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        lora_scale: float | None = None,
    ) -> None:
        """Push a full set of weights; the engine quantizes 16-bit ones in place.

        Args:
            named_tensors: ``model.named_parameters()``, or any pairs of checkpoint name and
                tensor (fp32, bf16 or fp16), in any order.  Trainers' wrapper prefixes are
                stripped and sharded tensors gathered.  What
                :func:`~flashrl.core.updates.quantized.quantize_tensors` yields is taken too, by
                engines with that capability.
            version: The weight version; the next integer without it.
            lora_scale: alpha / rank, where LoRA factors are among them and are to be merged.

        Raises:
            WeightUpdateError: A name is unknown, a shape or dtype does not fit, a tensor is not
                finite, or some never came.  :attr:`version` is None until a full update succeeds.
            EngineStateError: The engine cannot take weights now.
        """
        with self.update(version=version) as update:
            update.push(named_tensors, lora_scale=lora_scale)

    @contextmanager
    def update(self, *, version: int | None = None) -> Iterator[WeightUpdate]:
        """An update that comes in buckets; complete, or an error, when the block ends.

        Args:
            version: The weight version; the next integer without it.

        Raises:
            WeightUpdateError: At the end of the block, for all buckets together.

        Example:
            >>> with session.update(version=3) as update:  # doctest: +SKIP
            ...     for bucket in buckets:
            ...         update.push(bucket)
        """
        ledger = UpdateLedger(self.engine.weights(), quantized=self.capabilities.quantized_pushes)
        number = self._latest + 1 if version is None else version
        self.version = None
        yield WeightUpdate(self.engine, ledger, version=number)
        ledger.finish()
        self.version = self._latest = number

    def verify(self, named_tensors: NamedTensors) -> VerifyReport:
        """Compare every tensor the engine holds with the reference, bit for bit.

        Args:
            named_tensors: The weights that were pushed last.

        Returns:
            The report, if all are equal.

        Raises:
            VerificationError: Some differ, and are named; or the last update did not complete.
            WeightUpdateError: ``named_tensors`` is not the engine's full set of weights.
        """
        if self.version is None:
            raise VerificationError(
                "the last weight update did not complete, so there is nothing whole to verify; "
                "push a full update first"
            )
        infos = self.engine.weights()
        ledger = UpdateLedger(infos)
        comparisons = []
        for name, expected in compute_expected(
            ledger.admit(named_tensors), infos, profile=self.profile
        ):
            [(_, held)] = self.engine.read_weights([name])
            comparisons.append(compare(name, held, expected, infos[name]))
        ledger.finish()
        report = VerifyReport(version=self.version, comparisons=tuple(comparisons))
        report.raise_for_mismatch()
        return report

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> Rollout:
        """Sample one response for each prompt, with exact log-probabilities.

        Args:
            prompt_ids: Token ids of each prompt; no padding.
            params: How to sample.

        Returns:
            Right-padded responses, stamped with the weight version.

        Raises:
            UnsupportedError: The engine generates through its own calls only, or could not report
                exact log-probabilities under ``params``.
            EngineStateError: The last weight update did not complete.
        """
        engine = self.engine
        if not (engine.capabilities.generates and isinstance(engine, RolloutEngine)):
            raise UnsupportedError(f"{self.engine_name} generates through its own calls only")
        if self.version is None:
            raise EngineStateError(
                "the last weight update did not complete, so the weights are part old, part new; "
                "push a full update before generating"
            )
        return engine.generate(prompt_ids, params or SamplingParams(), version=self.version)

    def describe(self) -> dict[str, Any]:
        """Plain facts for people: engine, scheme, version, kernels, layers, bytes."""
        return {
            "engine": self.engine_name,
            "scheme": self.scheme.name,
            "version": self.version,
            **self.engine.describe(),
        }

    def detach(self) -> None:
        """Give the engine back; calling it again does nothing.

        Raises:
            UnsupportedError: The engine cannot go back to 16 bit.
        """
        if self._engine is not None:
            self._engine.detach()
            self._engine = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._engine is not None and self.capabilities.detaches:
            self.detach()


class WeightUpdate:
    """An update in progress; made by :meth:`Session.update`."""

    def __init__(self, engine: AttachedEngine, ledger: UpdateLedger, *, version: int) -> None:
        self._engine = engine
        self._ledger = ledger
        self.version = version

    def push(self, named_tensors: NamedTensors, *, lora_scale: float | None = None) -> None:
        """Load some of the weights; faults are kept until the update ends.

        Args:
            named_tensors: Names and tensors, in any order; their memory may be reused afterwards.
            lora_scale: As for :meth:`Session.update_weights`.

        Raises:
            EngineStateError: The engine cannot take weights now.
        """
        admitted = self._ledger.admit(named_tensors, lora_scale=lora_scale)
        try:
            self._engine.update_weights(admitted, version=self.version)
        except WeightUpdateError as refused:
            self._ledger.refuse(refused.faults)
