"""A running vLLM engine whose linears are 8-bit, as a session sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from flashrl.core.interfaces import Capabilities, NamedTensors, WeightInfo
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.arguments import fingerprint
from flashrl.engines.vllm.log_probs import EXACT, extract_rollout, native_sampling_params
from flashrl.engines.vllm.transport import Workers
from flashrl.errors import EngineStateError, SchemeError, UnsupportedError, WeightUpdateError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["AttachedVLLM"]

logger = logging.getLogger(__name__)

CAPABILITIES = Capabilities(
    schemes=tuple(PRESETS),
    exact_log_probs=EXACT,
    generates=True,
    static_scales=True,
    smoothing=True,
    mixture_of_experts=True,
    quantized_pushes=True,
    detaches=True,
)

# Names read back with one call to the workers.
_READ_AT_ONCE = 32


class AttachedVLLM:
    """A vLLM engine; made by :class:`VLLMAdapter`.

    Args:
        engine: A ``vllm.LLM``, an ``LLMEngine`` or an ``AsyncLLM``, 16-bit or started in 8 bit.
        scheme: How its linears are stored.
        profile: Smoothing factors and static scales.
    """

    def __init__(self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None) -> None:
        self._engine = engine
        self._scheme = scheme
        self._workers = Workers(engine)
        launched = self._workers.call("launched")[0]
        if launched is not None:
            _check_launched(launched, scheme, profile)
        self._log_probs_mode = self._workers.attach(attrs.asdict(scheme), profile)
        self._launched = launched is not None
        self._infos: dict[str, WeightInfo] | None = None
        if compat.unseeded_draws_are_biased():
            logger.warning(
                "this vLLM draws requests without a seed from another distribution than it reports "
                "(vllm#59786); session.generate gives each one a seed, other calls should too"
            )

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return attrs.evolve(CAPABILITIES, detaches=not self._launched)

    def weights(self) -> Mapping[str, WeightInfo]:
        """Every tensor an update must bring, by checkpoint name."""
        if self._infos is None:
            replies = self._workers.call("weights")
            tied = self._model_config().hf_config.get_text_config().tie_word_embeddings
            self._infos = _weight_infos(replies[0], self._scheme, tied=tied)
        return self._infos

    def update_weights(self, named_tensors: NamedTensors, *, version: int | None = None) -> None:
        """Quantize 16-bit weights into place; see :class:`AttachedEngine`."""
        self._check_idle("take weights")
        faults = self._workers.update(named_tensors)
        self._workers.run("reset_prefix_cache")
        if faults:
            raise WeightUpdateError(
                "tensors were refused:\n  " + "\n  ".join(list(faults.values())[:8]), faults=faults
            )

    def read_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors as the engine holds them, dequantized to float32, on the CPU."""
        infos = self.weights()
        for start in range(0, len(names), _READ_AT_ONCE):
            batch = list(names[start : start + _READ_AT_ONCE])
            whole = {name: torch.full(infos[name].shape, torch.nan) for name in batch}
            for name, size, stride, offset, part in self._workers.read(batch):
                whole[name].as_strided(size, stride, offset).copy_(part)
            yield from whole.items()

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        version: int | None = None,
    ) -> Rollout:
        """Sample one response for each prompt; see :class:`RolloutEngine`."""
        self._check_idle("generate")
        self._check_exact()
        if params.seed is None and compat.unseeded_draws_are_biased():
            params = attrs.evolve(params, seed=int(torch.randint(1 << 31, ())))
        native = [native_sampling_params(params, index=i) for i in range(len(prompt_ids))]
        outputs = self._workers.generate(prompt_ids, native)
        return extract_rollout(outputs, params=params, version=version)

    def describe(self) -> dict[str, Any]:
        """Kernels, layers and bytes, of each worker."""
        replies = self._workers.call("describe")
        return {**replies[0], "bytes": sum(r["bytes"] for r in replies), "workers": len(replies)}

    def detach(self) -> None:
        """Put 16-bit linears back, with the dequantized weights.

        Raises:
            UnsupportedError: The engine was started in 8 bit.
        """
        self._check_idle("detach")
        self._workers.call("detach")

    def _model_config(self) -> Any:
        core = getattr(self._engine, "llm_engine", self._engine)
        return core.vllm_config.model_config

    def _check_idle(self, action: str) -> None:
        if self._workers.is_generating():
            raise EngineStateError(
                f"the vLLM engine is generating, so it can not {action}; wait for its requests, "
                "or abort them"
            )

    def _check_exact(self) -> None:
        if self._log_probs_mode != "processed_logprobs":
            raise UnsupportedError(
                f"the engine reports {self._log_probs_mode}, not the log-probability of the "
                "distribution sampled; start it with logprobs_mode='processed_logprobs', as "
                "flashrl.launch_args('vllm', scheme) does"
            )
        core = getattr(self._engine, "llm_engine", self._engine)
        if core.vllm_config.speculative_config is not None:
            raise UnsupportedError(
                "with speculative decoding vLLM does not report the log-probability of the "
                "distribution sampled; start the engine without it"
            )


def _check_launched(
    launched: Mapping[str, Any], scheme: QuantScheme, profile: Profile | None
) -> None:
    """Refuse to attach to an engine that was started in another way."""
    started = QuantScheme(**launched["scheme"])
    if started != scheme:
        raise SchemeError(
            f"the engine was started with scheme {started.name!r}, and attach got "
            f"{scheme.name!r}; attach with the first, or start an engine with the second"
        )
    if launched["profile"] != fingerprint(profile):
        how = "with a profile" if launched["profile"] else "without a profile"
        raise SchemeError(
            f"the engine was started {how}, and attach got {'another' if profile else 'none'}; "
            "pass attach what the engine was started with"
        )


def _weight_infos(
    rows: Sequence[Sequence[Any]], scheme: QuantScheme, *, tied: bool
) -> dict[str, WeightInfo]:
    """What the workers found, with names of one storage under the first of them."""
    infos: dict[str, WeightInfo] = {}
    by_address: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, shape, dtype, quantized, num_input_shards, address in rows:
        first = by_address.setdefault(address, name)
        if first != name:
            aliases.setdefault(first, []).append(name)
            continue
        infos[name] = WeightInfo(
            shape=tuple(shape),
            dtype=getattr(torch, dtype),
            scheme=scheme if quantized else None,
            num_input_shards=num_input_shards,
        )
    embeddings = [name for name in infos if name.endswith("embed_tokens.weight")]
    if tied and len(embeddings) == 1 and "lm_head.weight" not in infos:
        aliases.setdefault(embeddings[0], []).append("lm_head.weight")
    return {
        name: attrs.evolve(info, aliases=tuple(dict.fromkeys(aliases.get(name, ()))))
        for name, info in infos.items()
    }
