"""A checkpoint on disk, read a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashrl.core.names import NameIndex, canonical
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.errors import ProfileError, SchemeError

__all__ = ["Checkpoint"]

_SCALE_SUFFIXES = ("_scale", "_scale_inv")  # compressed-tensors; DeepSeek's, a multiplier as well
_UNREADABLE = ("_packed", "_zero_point", "_g_idx", "_global_scale")


@attrs.frozen(kw_only=True)
class Header:
    """Where a tensor is and what it looks like.

    Args:
        file: The file that holds it.
        shape: Its shape.
        dtype: Its dtype in safetensors' words, such as ``BF16``, ``I8`` or ``F8_E4M3``.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class Checkpoint:
    """Names, shapes and, on demand, tensors of a safetensors checkpoint.

    Every read opens its file and closes it again, so that no page of a checkpoint larger than
    memory stays mapped.

    Args:
        path: Where it came from, for messages.
        headers: The header of each tensor, under its name on disk.
        config: The model's ``config.json``; empty without one.
    """

    path: Path
    headers: Mapping[str, Header] = attrs.field(repr=False)
    config: Mapping[str, Any] = attrs.field(repr=False, factory=dict)
    _index: NameIndex = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_index", NameIndex(self.headers))

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the headers of a checkpoint.

        Args:
            path: A ``.safetensors`` file, an index, or a folder that holds either.

        Raises:
            ProfileError: There is no safetensors checkpoint, or it is incomplete or damaged.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        headers: dict[str, Header] = {}
        for file in _find_files(path):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dict)
                    view = tensors.get_slice(name)
                    headers[name] = Header(
                        file=file, shape=tuple(view.get_shape()), dtype=view.get_dtype()
                    )
        return cls(path=path, headers=headers, config=_read_json(folder / "config.json"))

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name, in any spelling."""
        return self._index.find(name) is not None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every name on disk and its tensor, one at a time."""
        return ((name, self.tensor(name)) for name in self.headers)

    def header(self, name: str) -> Header:
        """The header of a tensor.

        Args:
            name: In any spelling.

        Raises:
            UnknownNameError: There is none of that name.
        """
        return self.headers[self._index.resolve(name)]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Args:
            name: In any spelling.

        Returns:
            The tensor, on the CPU, in its own memory.

        Raises:
            UnknownNameError: There is none of that name.
            ProfileError: The file is damaged.
        """
        name = self._index.resolve(name)
        with _open(self.headers[name].file) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            # A clone, for what safetensors returns may map the file.
            return tensor.clone()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some rows of one tensor, and nothing else of it.

        Args:
            name: In any spelling.
            start: The first row.
            stop: The row after the last.

        Returns:
            The rows, on the CPU, in their own memory.

        Raises:
            UnknownNameError: There is none of that name.
            ProfileError: The file is damaged.
        """
        name = self._index.resolve(name)
        with _open(self.headers[name].file) as tensors:
            rows: Tensor = tensors.get_slice(name)[start:stop]
            return rows.clone()

    def scale_name(self, name: str) -> str | None:
        """The name on disk of a weight's scale; None for a weight that is not quantized."""
        found = (self._index.find(name + suffix) for suffix in _SCALE_SUFFIXES)
        return next((scale for scale in found if scale is not None), None)

    def quantized_weights(self) -> tuple[str, ...]:
        """Canonical names of the weights that have a scale, in the order on disk.

        Raises:
            ProfileError: A weight is packed or asymmetric, so that ``q · scale`` is not its value.
        """
        unreadable = [name for name in self.headers if name.endswith(_UNREADABLE)]
        if unreadable:
            raise ProfileError(
                f"{self.path} holds {unreadable[0]}; only symmetric 8-bit weights with a "
                "weight_scale can be read (compressed-tensors' int-quantized, float-quantized "
                "and naive-quantized formats)"
            )
        return tuple(canonical(name) for name in self.headers if self.scale_name(name))

    def weight_scheme(self) -> QuantScheme:
        """How the checkpoint's weights are quantized, as its tensors show.

        Returns:
            The preset of the same type and strategy, with the ``ignore`` list of ``config.json``.

        Raises:
            ProfileError: Nothing is quantized, or not all of it alike.
            SchemeError: No preset stores weights like this.
        """
        weights = self.quantized_weights()
        if not weights:
            raise ProfileError(f"{self.path} holds no quantized weight (none has a weight_scale)")
        kinds = {name: self._kind(name) for name in weights}
        first = kinds[weights[0]]
        odd = next((name for name in weights if kinds[name] != first), None)
        if odd is not None:
            raise ProfileError(
                f"{self.path}: {weights[0]} is {' '.join(first)}, {odd} is "
                f"{' '.join(kinds[odd])}; one profile holds one scheme"
            )
        presets = (scheme for scheme in PRESETS.values() if scheme.quantized)
        scheme = next((s for s in presets if (s.type, s.strategy) == first), None)
        if scheme is None:
            raise SchemeError(
                f"{self.path} stores {' '.join(first)} weights; known: {', '.join(PRESETS)}"
            )
        return scheme.evolve(ignore=tuple(self._quantization_config().get("ignore") or ()))

    def _kind(self, weight: str) -> tuple[str, str]:
        """Type and strategy of one quantized weight."""
        header = self.header(weight)
        types = {"I8": "int", "F8_E4M3": "float"}
        if header.dtype not in types or len(header.shape) != 2:
            raise ProfileError(
                f"{self.path}: {weight} has a scale but is {header.dtype} {list(header.shape)}; "
                "int8 or fp8 e4m3fn [out, in] is expected"
            )
        scale_shape = self.header(self.scale_name(weight) or "").shape
        rows = header.shape[0]
        if scale_shape in ((rows,), (rows, 1)):
            return types[header.dtype], "channel"
        return types[header.dtype], "block" if len(scale_shape) == 2 else "tensor"

    def _quantization_config(self) -> Mapping[str, Any]:
        found = self.config.get("quantization_config") or self.config.get("compression_config")
        return found if isinstance(found, Mapping) else {}


def _find_files(path: Path) -> Sequence[Path]:
    index = path / "model.safetensors.index.json" if path.is_dir() else path
    if index.name.endswith(".index.json") and index.exists():
        weight_map = _read_json(index).get("weight_map", {})
        files = sorted({index.parent / file for file in weight_map.values()})
    elif path.is_dir():
        files = sorted(path.glob("*.safetensors"))
    else:
        files = [path] if path.suffix == ".safetensors" else []
    absent = [str(file) for file in files if not file.exists()]
    if absent or not files:
        raise ProfileError(
            f"no safetensors checkpoint at {path}"
            + (f"; missing: {', '.join(absent)}" if absent else "")
            + "; give a .safetensors file, its index, or the folder of either "
            "(a folder of .bin files must be saved anew with save_pretrained)"
        )
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ProfileError(f"{file} is no readable safetensors file: {error}") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProfileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ProfileError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content
