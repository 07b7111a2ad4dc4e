"""What happens inside a worker: the only code of FlashRL that holds vLLM's model.

vLLM calls :func:`call` by name in every worker; arguments and results are plain values, and tensors
travel in files, so that it works across processes without pickle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from flashrl.core.interfaces import NamedTensors
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.checkpoint_names import checkpoint_shapes
from flashrl.engines.vllm.conversion import Converted, convert, convert_back
from flashrl.engines.vllm.loading import load_weights
from flashrl.engines.vllm.placement import Piece, find_pieces, storages_of
from flashrl.errors import FlashRLError

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
        self._pieces: dict[str, list[Piece]] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._scheme: QuantScheme | None = None
        self._converted: list[Converted] = []
        self._sampler: Any = None

    def launched_scheme(self) -> dict[str, Any] | None:
        """Fields of the scheme that the engine was started with, or None."""
        config = self._worker.vllm_config.quant_config
        scheme = getattr(config, "scheme", None)
        return compat.scheme_fields(scheme) if isinstance(scheme, QuantScheme) else None

    def attach(self, scheme: Mapping[str, Any]) -> str:
        """Make the running model 8-bit; returns what its log-probabilities are of."""
        wanted = QuantScheme(**scheme)
        if self.launched_scheme() is None and wanted != self._scheme:
            if self._scheme is not None:
                convert_back(self._converted, self._model)
            self._converted = convert(self._model, wanted, self._worker)
            self._scheme = wanted
        self._pieces = None
        self._sampler = self._sampler or compat.use_processed_log_probs(self._worker)
        return str(self._worker.vllm_config.model_config.logprobs_mode)

    def detach(self) -> None:
        """Make the model 16-bit again."""
        convert_back(self._converted, self._model)
        compat.restore_sampler(self._worker, self._sampler)
        self._scheme, self._converted = None, []
        self._pieces = self._sampler = None

    def weights(self) -> list[list[Any]]:
        """Every tensor of a full update: name, shape, dtype, 8-bit or not, slices, address."""
        return [
            [
                name,
                list(self._shapes[name]),
                str(pieces[0].home.dtype).removeprefix("torch."),
                pieces[0].scheme is not None,
                _num_input_shards(pieces, self._shapes[name]),
                pieces[0].home.data_ptr(),
            ]
            for name, pieces in self._find().items()
        ]

    def update(self, named_tensors: NamedTensors) -> dict[str, str]:
        """Load weights; returns why each refused tensor was refused."""
        compat.settle_reload(self._model)
        quantized = {name for name, pieces in self._find().items() if pieces[0].scheme is not None}
        return load_weights(self._model, named_tensors, quantized)

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
        }

    def _find(self) -> dict[str, list[Piece]]:
        if self._pieces is None:
            compat.settle_reload(self._model)
            shapes = checkpoint_shapes(self._worker.vllm_config.model_config)
            self._shapes = shapes
            self._pieces = find_pieces(self._model, shapes, storages_of(self._model).values())
        return self._pieces


def _num_input_shards(pieces: list[Piece], shape: tuple[int, ...]) -> int:
    """In how many slices of the input axis a quantized weight is."""
    if pieces[0].scheme is None or len(shape) != 2:
        return 1
    return shape[1] // pieces[0].size[1]
