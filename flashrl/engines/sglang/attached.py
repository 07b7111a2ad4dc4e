"""A running SGLang engine whose linears are 8-bit: it takes 16-bit weights, and generates."""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor

from flashrl import errors
from flashrl.core.interfaces import Capabilities, NamedTensors, WeightInfo
from flashrl.core.profiles import Profile
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.engines.sglang import compat
from flashrl.engines.sglang.faults import parse_faults
from flashrl.engines.sglang.log_probs import (
    build_request,
    build_rollout,
    check_exact,
    check_prompts,
    needs_support,
)
from flashrl.errors import EngineStateError, WeightUpdateError

__all__ = ["AttachedSGLang"]

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 256 << 20
_READ_ELEMENTS = 1 << 28


class AttachedSGLang:
    """SGLang's engine; made by :class:`SGLangAdapter`.

    Args:
        engine: A running ``sgl.Engine``, in 16 bit or started 8-bit with the same scheme.
        scheme: How its linears are stored.
        profile: Smoothing factors and static scales.

    Raises:
        UnsupportedError: The engine is spread over replicas or stages, or its graphs are captured.
    """

    def __init__(self, engine: Any, scheme: QuantScheme, *, profile: Profile | None = None) -> None:
        self._engine = engine
        self._check_alive()
        compat.check_engine(engine, scheme)
        self._scheme = scheme
        self._support = compat.largest_support(engine)
        self._vocab = int(engine.tokenizer_manager.model_config.vocab_size)
        self.capabilities = _capabilities(support=self._support, vocab=self._vocab)
        self._flush()
        with tempfile.TemporaryDirectory(prefix="flashrl-") as folder:
            path = str(Path(folder) / "profile.safetensors") if profile is not None else None
            if profile is not None and path is not None:
                profile.save(path)
            self._call("attach", scheme=attrs.asdict(scheme), profile=path)
        self._flush()

    def weights(self) -> Mapping[str, WeightInfo]:
        """Every tensor an update must bring, by checkpoint name."""
        return {
            name: WeightInfo(
                shape=tuple(place["shape"]),
                dtype=getattr(torch, place["dtype"]),
                scheme=self._scheme if place["quantized"] else None,
                num_input_shards=place["ranks"] if place["dim"] == 1 else 1,
                aliases=tuple(place["aliases"]),
            )
            for name, place in self._places[0].items()
        }

    def update_weights(self, named_tensors: NamedTensors, *, version: int | None = None) -> None:
        """Quantize 16-bit weights into place; see :class:`AttachedEngine`."""
        self._flush()
        faults: dict[str, str] = {}
        with compat.weight_update(self._engine):
            for bucket in _buckets(named_tensors):
                success, message = self._engine.update_weights_from_tensor(
                    bucket, flush_cache=False
                )
                if not success:
                    refused = parse_faults(message)
                    faults.update(refused or dict.fromkeys((name for name, _ in bucket), message))
        self._flush()
        if faults:
            lines = [f"{name}: {fault}" for name, fault in list(faults.items())[:8]]
            raise WeightUpdateError(
                f"{len(faults)} tensors were refused:\n  " + "\n  ".join(lines), faults=faults
            )

    def read_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as the engine holds them, dequantized to float32, on the CPU."""
        for group in self._groups(names):
            with self._asked("read", names=group) as folder:
                ranks = [load_file(folder / f"{r}.safetensors") for r in range(len(self._places))]
                for name in group:
                    yield name, self._assemble(name, [tensors[name] for tensors in ranks])

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        version: int | None = None,
    ) -> Rollout:
        """Sample one response for each prompt with SGLang's own scheduler.

        Raises:
            UnsupportedError: The log-probability under ``params`` would not be exact.
            EngineStateError: The weights were released and not pushed since.
        """
        self._check_alive()
        prompts = check_prompts(prompt_ids)
        check_exact(
            params, self.capabilities.exact_log_probs, most=self._support, vocab=self._vocab
        )
        if params.seed is not None and not compat.draws_repeat(self._engine):
            _warn_seed()
        try:
            answers = compat.generate(
                self._engine,
                prompts,
                build_request(params, vocab=self._vocab),
                support=needs_support(params),
            )
        except ValueError as error:
            raise EngineStateError(f"SGLang refused to generate: {error}") from error
        return build_rollout(answers, params, version=version)

    def describe(self) -> dict[str, Any]:
        """Kernels, layers and bytes, of all ranks together."""
        ranks = self._call("describe")
        return {**ranks[0], "bytes": sum(r["bytes"] for r in ranks), "ranks": len(ranks)}

    def detach(self) -> None:
        """Put 16-bit layers back.

        They hold what they held before :func:`flashrl.attach`, or, where an update has come since,
        its dequantized values.  An engine that was started 8-bit stays so.
        """
        if compat.is_alive(self._engine):
            self._call("detach")
            self._flush()

    @functools.cached_property
    def _places(self) -> list[dict[str, Any]]:
        """Where each tensor lives, by rank and name."""
        return self._call("weights")

    def _groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Names whose tensors fit into one file together."""
        group: list[str] = []
        size = 0
        for name in names:
            numel = _numel(self._places[0][name]["shape"])
            if group and size + numel > _READ_ELEMENTS:
                yield group
                group, size = [], 0
            group.append(name)
            size += numel
        if group:
            yield group

    def _assemble(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from each rank's part."""
        dim = self._places[0][name]["dim"]
        if dim is None:
            return parts[0]
        ordered = {place[name]["rank"]: p for place, p in zip(self._places, parts, strict=True)}
        return torch.cat([ordered[rank] for rank in sorted(ordered)], dim=dim)

    def _call(self, command: str, **request: Any) -> list[dict[str, Any]]:
        with self._asked(command, **request) as folder:
            return _answers(folder)

    @contextmanager
    def _asked(self, command: str, **request: Any) -> Iterator[Path]:
        """Ask every scheduler, and hold the folder with the answers.

        Raises:
            EngineStateError: The plugin is not loaded there, or something failed.
        """
        self._check_alive()
        memory = "/dev/shm"  # noqa: S108  # tensors that never touch a disk
        with tempfile.TemporaryDirectory(
            prefix="flashrl-", dir=memory if os.path.isdir(memory) else None
        ) as name:
            folder = Path(name)
            (folder / "request.json").write_text(json.dumps(request))
            try:
                self._engine.collective_rpc("flashrl", command=command, folder=name)
            except AssertionError as error:
                raise EngineStateError(
                    f"SGLang's scheduler could not carry out {command!r}: {error}. If it has no "
                    "attribute 'flashrl', its plugin was not loaded there: install flashrl in the "
                    "scheduler's environment, and name it in SGLANG_PLUGINS if that is set"
                ) from error
            _answers(folder)
            yield folder

    def _check_alive(self) -> None:
        if not compat.is_alive(self._engine):
            raise EngineStateError(
                "the engine is shut down, or one of its schedulers died; start a new one"
            )

    def _flush(self) -> None:
        """Forget cached prefixes, which other weights computed.

        Raises:
            EngineStateError: Requests are running, or the engine is shut down.
        """
        self._check_alive()
        # A scheduler answers a request a little before it counts it as finished.
        for wait in (*[0.02] * 50, *[0.2] * 20):
            if all(rank["idle"] for rank in self._call("flush")):
                return
            time.sleep(wait)
        raise EngineStateError(
            "the engine is generating, so its weights cannot change now; wait for the running "
            "requests, or abort them"
        )


def _capabilities(*, support: int, vocab: int) -> Capabilities:
    exact = set()
    if compat.reports_tempered():
        exact |= {
            "temperature",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
        }
    if exact and support:
        exact.add("top_k")
    if exact and support >= vocab:
        exact |= {"top_p", "min_p"}
    return Capabilities(
        schemes=tuple(PRESETS),
        exact_log_probs=frozenset(exact),
        generates=True,
        static_scales=True,
        smoothing=True,
        mixture_of_experts=True,
        quantized_pushes=True,
        detaches=True,
    )


def _buckets(named_tensors: NamedTensors) -> Iterator[list[tuple[str, Tensor]]]:
    """Copies of tensors in lists of bounded size: the sender may reuse its memory."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        bucket.append((name, copy))
        size += copy.numel() * copy.element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _answers(folder: Path) -> list[dict[str, Any]]:
    """What each rank answered, in order.

    Raises:
        FlashRLError: What the first rank that failed said.
    """
    files = sorted(
        (path for path in folder.glob("*.json") if path.stem.isdigit()),
        key=lambda path: int(path.stem),
    )
    answers = [json.loads(path.read_text()) for path in files]
    for answer in answers:
        if "error" in answer:
            kind: type[errors.FlashRLError] = getattr(errors, answer["error"])
            raise kind(answer["message"])
    if not answers:
        raise EngineStateError("no scheduler answered")
    return answers


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@functools.cache
def _warn_seed() -> None:
    logger.warning(
        "SGLang draws from its own state unless it was started with "
        "enable_deterministic_inference=True, so seed has no effect"
    )
