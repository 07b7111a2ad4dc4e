"""Calls from the process that holds the engine to the workers that hold the model."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashrl import errors
from flashrl.core.interfaces import NamedTensors
from flashrl.engines.vllm import compat
from flashrl.errors import EngineStateError, FlashRLError, UnsupportedError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["Workers"]

_BUCKET_BYTES = 256 << 20
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a file system in memory, where there is one


class Workers:
    """The workers of an engine, wherever they run.

    Args:
        engine: A ``vllm.LLM``, an ``LLMEngine`` or an ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._core = getattr(engine, "llm_engine", engine)
        self._async = asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None))
        client = getattr(self._core, "engine_core", None)
        executor = getattr(getattr(client, "engine_core", None), "model_executor", None)
        self.in_process = type(executor).__name__ == "UniProcExecutor"

    def call(self, operation: str, *args: Any) -> list[Any]:
        """Run an operation in every worker; see :func:`flashrl.engines.vllm.worker.call`.

        Returns:
            One result a worker, by rank.

        Raises:
            FlashRLError: What a worker raised.
            EngineStateError: The engine is shut down.
        """
        replies = self.run("collective_rpc", "flashrl", args=(operation, *args))
        for reply in replies:
            if "error" in reply:
                kind, message = reply["error"]
                raise getattr(errors, kind, FlashRLError)(message)
        return [reply["result"] for reply in replies]

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine, which may be a coroutine.

        Raises:
            EngineStateError: The engine is shut down.
            UnsupportedError: The workers do not know FlashRL.
        """
        self._check_alive()
        try:
            result = getattr(self._engine, method)(*args, **kwargs)
            return self._wait(result) if asyncio.iscoroutine(result) else result
        except NotImplementedError as error:
            if isinstance(error, FlashRLError):
                raise
            raise UnsupportedError(
                "the workers do not know flashrl: it must be installed where they run, and "
                f"VLLM_PLUGINS, if set, must name 'flashrl' ({error})"
            ) from error
        except Exception:
            self._check_alive()
            raise

    def attach(self, scheme: dict[str, Any], profile: Profile | None) -> str:
        """Make every worker's model 8-bit; returns what log-probabilities are of."""
        if profile is None:
            return str(self.call("attach", scheme, None)[0])
        with _folder() as folder:
            profile.save(folder / "profile.safetensors")
            return str(self.call("attach", scheme, str(folder / "profile.safetensors"))[0])

    def update(self, named_tensors: NamedTensors) -> dict[str, str]:
        """Load weights in every worker; returns why each refused tensor was refused."""
        if self.in_process:
            [faults] = self.call("update", named_tensors)
            return dict(faults)
        refused: dict[str, str] = {}
        for bucket in _buckets(named_tensors):
            with _folder() as folder:
                path = folder / "weights.safetensors"
                save_file(bucket, path)
                for faults in self.call("update_from_file", str(path)):
                    refused.update(faults)
        return refused

    def read(self, names: list[str]) -> list[list[Any]]:
        """Pieces of tensors from all workers; see :meth:`WorkerEngine.read`."""
        if self.in_process:
            return [piece for pieces in self.call("read", names) for piece in pieces]
        from safetensors import safe_open

        with _folder() as folder:
            result = []
            for pieces in self.call("read_to_folder", names, str(folder)):
                for *place, path, key in pieces:
                    with safe_open(path, framework="pt") as file:
                        result.append([*place, file.get_tensor(key).clone()])
            return result

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """Generate for prompts of token ids, each with its own sampling parameters."""
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        if not self._async:
            return list(self.run("generate", requests, list(params), use_tqdm=False))
        self._check_alive()
        return list(self._wait(self._generate_async(requests, params)))

    async def _generate_async(self, requests: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        async def one(request: Any, native: Any) -> Any:
            native.output_kind = RequestOutputKind.FINAL_ONLY
            async for output in self._engine.generate(request, native, uuid.uuid4().hex):
                final = output
            return final

        from vllm.sampling_params import RequestOutputKind

        return await asyncio.gather(*map(one, requests, params))

    def is_generating(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._core.output_processor.has_unfinished_requests())

    def is_shut_down(self) -> bool:
        """Whether the engine has ended."""
        return compat.is_shut_down(self._core.engine_core)

    def _check_alive(self) -> None:
        if self.is_shut_down():
            raise EngineStateError("the vLLM engine is shut down; start a new one and attach to it")

    def _wait(self, coroutine: Any) -> Any:
        handler = getattr(self._engine, "output_handler", None)
        loop = handler.get_loop() if handler is not None else None
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not None:
            coroutine.close()
            raise EngineStateError(
                "an AsyncLLM can not be waited for inside its own event loop; call it from "
                "another thread: await asyncio.to_thread(session.update_weights, weights)"
            )
        if loop is None or not loop.is_running():
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def _buckets(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copies on the CPU, some hundred MiB at a time."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += bucket[name].numel() * bucket[name].element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


@contextmanager
def _folder() -> Iterator[Path]:
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="flashrl-", dir=parent) as folder:
        yield Path(folder)


def as_dtype(name: str) -> torch.dtype:
    """A dtype by its name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
