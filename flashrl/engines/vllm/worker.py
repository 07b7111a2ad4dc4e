"""What happens inside a worker: the only code of FlashRL that holds vLLM's model.

vLLM calls :func:`call` by name in every worker; arguments and results are plain values, and tensors
travel in files, so that it works across processes without pickle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors.torch import load_file, save_file
from torch import nn

from flashrl.core.interfaces import NamedTensors
from flashrl.core.profiles import Profile
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.arguments import fingerprint
from flashrl.engines.vllm.conversion import Conversion
from flashrl.engines.vllm.intake import Intake, intake_of
from flashrl.engines.vllm.placement import Piece, storages_of
from flashrl.errors import EngineStateError, FlashRLError, UnsupportedError

__all__ = ["WorkerEngine", "call"]


def call(worker: Any, operation: str, *args: Any) -> Any:
    """Run one operation of this worker's :class:`WorkerEngine`.

    Args:
        worker: vLLM's worker.
        operation: The name of one of its methods.
        args: Plain values.

    Returns:
        ``{"result": ...}``, or ``{"error": [class name, message]}``: exceptions of ours do not
        survive the way between processes.
    """
    try:
        engine = getattr(worker, "flashrl_engine", None)
        if engine is None:
            engine = worker.flashrl_engine = WorkerEngine(worker)
        method: Callable[..., Any] = getattr(engine, operation)
        return {"result": method(*args)}
    except FlashRLError as error:
        return {"error": [type(error).__name__, str(error)]}


class WorkerEngine:
    """FlashRL in one worker.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: nn.Module = worker.get_model()
        self._scheme: QuantScheme | None = None
        self._conversion: Conversion | None = None
        self._sampler: Any = None

    def launched(self) -> dict[str, Any] | None:
        """Scheme and profile that the engine was started with, or None."""
        config = self._worker.vllm_config.quant_config
        scheme, intake = getattr(config, "scheme", None), intake_of(self._model)
        if not isinstance(scheme, QuantScheme) or intake is None:
            return None
        return {
            "scheme": attrs.asdict(scheme),
            "profile": fingerprint(intake.profile),
        }

    def attach(self, scheme: Mapping[str, Any], profile: str | None) -> str:
        """Make the running model 8-bit; returns what its log-probabilities are of.

        Args:
            scheme: Fields of the scheme.
            profile: Path of a profile.
        """
        if self.launched() is None:
            wanted = QuantScheme(**scheme)
            smoothing = Profile.load(profile) if profile is not None else None
            if self._conversion is not None and not self._conversion.is_for(wanted, smoothing):
                self._undo()
            if self._conversion is None:
                self._conversion = Conversion(self._model, wanted, self._worker, profile=smoothing)
        self._sampler = self._sampler or compat.use_processed_log_probs(self._worker)
        return str(self._worker.vllm_config.model_config.logprobs_mode)

    def detach(self) -> None:
        """Make the model 16-bit again."""
        self._undo()
        compat.restore_sampler(self._worker, self._sampler)
        self._sampler = None

    def _undo(self) -> None:
        if self._conversion is None:
            raise UnsupportedError(
                "the engine was started in 8 bit, so it has no 16-bit layers to go back to; "
                "start another engine"
            )
        self._conversion.undo()
        self._conversion = None

    def weights(self) -> list[list[Any]]:
        """Every tensor of a full update: name, shape, dtype, 8-bit or not, slices, address."""
        return [
            [
                name,
                list(pieces[0].shape),
                str(pieces[0].home.dtype).removeprefix("torch."),
                pieces[0].scheme is not None,
                _num_input_shards(pieces),
                pieces[0].home.data_ptr(),
            ]
            for name, pieces in self._find().items()
        ]

    def update(self, named_tensors: NamedTensors) -> dict[str, str]:
        """Load weights; returns why each refused tensor was refused."""
        compat.settle_reload(self._model)
        return self._intake.update(named_tensors)

    def update_from_file(self, path: str) -> dict[str, str]:
        """Load weights that another process wrote."""
        return self.update(load_file(path).items())

    def read(self, names: list[str]) -> list[list[Any]]:
        """Pieces of some tensors: name, size, stride, offset and the float32 part."""
        return [
            [name, list(piece.size), list(piece.stride), piece.offset, piece.read()]
            for name in names
            for piece in self._find()[name]
        ]

    def read_to_folder(self, names: list[str], folder: str) -> list[list[Any]]:
        """The same for another process: the parts go to a file of this rank's in ``folder``."""
        pieces = self.read(names)
        path = str(Path(folder) / f"rank-{self._worker.rank}.safetensors")
        save_file({str(i): piece[-1].contiguous() for i, piece in enumerate(pieces)}, path)
        return [[*piece[:-1], path, str(i)] for i, piece in enumerate(pieces)]

    def describe(self) -> dict[str, Any]:
        """Kernels, layers and bytes of this worker."""
        methods = [getattr(m, "quant_method", None) for m in self._model.modules()]
        kernels = Counter(
            str(getattr(m, "kernel_name", "")) for m in methods if hasattr(m, "storages")
        )
        tensors = [*self._model.parameters(), *(s.scale for s in storages_of(self._model).values())]
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        quantized = [pieces[0].scheme is not None for pieces in self._find().values()]
        return {
            "model": type(self._model).__name__,
            "device": str(next(self._model.parameters()).device),
            "products": dict(kernels),
            "quantized_weights": sum(quantized),
            "kept_weights": len(quantized) - sum(quantized),
            "bytes": sum(sizes.values()),
            "kv_cache_scales": self._intake.cache.describe() if self._intake.cache else {},
        }

    @property
    def _intake(self) -> Intake:
        intake = intake_of(self._model)
        if intake is None:
            raise EngineStateError("the engine is 16-bit; attach to it first")
        return intake

    def _find(self) -> Mapping[str, Sequence[Piece]]:
        return self._intake.plan.pieces


def _num_input_shards(pieces: Sequence[Piece]) -> int:
    """In how many slices of the input axis a quantized weight is."""
    if pieces[0].scheme is None or len(pieces[0].shape) != 2:
        return 1
    return pieces[0].shape[1] // pieces[0].size[1]
