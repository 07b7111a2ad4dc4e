"""Fused quantization on a GPU: one read of the weight, one write of 8 bit, the reference's bits.

A kernel writes as it reads, so it cannot promise what :func:`flashrl.core.quantize.quantize_into`
does, that a weight with NaN or infinity leaves its destination untouched.  It raises a flag on the
device instead.  Who launches the kernels reads the flag, once a tensor or once an update, and
must then take the destination for lost until finite weights arrive.

Nothing here waits for the GPU, and nothing is allocated on it (:func:`quantize_many` excepted: 24
bytes a weight), so :func:`quantize` can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.errors import SchemeError, ShapeError, UnsupportedError

__all__ = ["available", "quantize", "quantize_many"]

_OLDEST_TRITON = (3, 6)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WARP_ELEMENTS = 256  # Elements that a warp takes at once: 8 a thread, 16 bytes of bf16.
_MOST_TILES = 15  # Tiles of a group that fit a thread's registers.
_MOST_REGISTERS = 128  # A thread's, so that two programs of 8 warps share a multiprocessor.
_MOST_WARPS = 16
_MOST_BLOCK_ELEMENTS = 1 << 15
_SCALE_LANES = 1024
_MOST_TENSORS = 65535  # A grid's second dimension ends there.


def available(device: torch.device | str, scheme: str | QuantScheme | None = None) -> bool:
    """Whether these kernels run on a device, and quantize to a scheme there.

    Args:
        device: Where the weights are.
        scheme: What they become; ``None`` asks for int8 rows.

    Returns:
        True on NVIDIA GPUs from compute capability 8.0 (fp8: 8.9) with Triton installed; on a CPU
        only where ``TRITON_INTERPRET=1`` has Triton interpret its kernels, which tests do.
    """
    device = torch.device(device)
    scheme = get_scheme("int8" if scheme is None else scheme)
    if not (scheme.quantized and _has_triton()):
        return False
    if scheme.block_structure is not None and not _fits(scheme.block_structure):
        return False
    if device.type == "cpu":
        return _interpreted()
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (
        (8, 9) if scheme.type == "float" else (8, 0)
    )


def quantize(
    weight: Tensor,
    out: Tensor,
    scale: Tensor,
    *,
    scheme: str | QuantScheme,
    smoothing: Tensor | None = None,
    flag: Tensor | None = None,
) -> None:
    """Quantize a weight into storage that exists already, scale included.

    Args:
        weight: fp32, bf16 or fp16, [out, in], any strides.
        out: 8-bit destination of the scheme's dtype, [out, in], any strides.
        scale: float32, shaped as :meth:`QuantScheme.scale_shape` says, or (out, 1) with
            ``strategy="tensor"``.  Written when ``scheme.dynamic``, read otherwise.
        scheme: What shares a scale, and the 8-bit type.
        smoothing: Factor per input channel that multiplies the weight first, (in,).
        flag: int32, (1,).  Set to 1 if the smoothed weight holds NaN or infinity, or a static scale
            is not finite and positive; what was written is then meaningless.  Else left alone.

    Raises:
        ShapeError: A shape, dtype or device does not fit; nothing was written.
        SchemeError: The scheme quantizes nothing.
        UnsupportedError: The scheme's blocks are too large for one program.
    """
    scheme = _check_scheme(scheme)
    _check(weight, out, scale, scheme, smoothing, flag)
    if not weight.numel():
        if scheme.dynamic:
            scale.fill_(1.0)
        return
    geometry = _geometry(weight, scheme)
    with _on(weight.device):
        if scheme.dynamic and not geometry.one_read:
            _find_scale(weight, scale, scheme, smoothing, geometry)
        _device_code().quantize_kernel[(geometry.num_groups(weight.shape),)](
            *(weight, out, scale, smoothing, flag),
            *_sizes(weight, out, scale, geometry),
            **_constants(scheme, geometry),
        )


def quantize_many(
    weights: Iterable[tuple[Tensor, Tensor, Tensor]],
    *,
    scheme: str | QuantScheme,
    smoothing: Tensor | None = None,
    flag: Tensor | None = None,
) -> None:
    """Quantize many weights with one launch for all of the same layout.

    For weights so small that launching a kernel takes longer than running it, as a
    mixture-of-experts has by the thousand.

    Args:
        weights: Triples (weight, out, scale), each as in :func:`quantize`.
        scheme: What shares a scale, and the 8-bit type.
        smoothing: As in :func:`quantize`, the same for all.
        flag: As in :func:`quantize`, one for all.

    Raises:
        ShapeError: A shape, dtype or device does not fit; nothing was written.
        SchemeError: The scheme quantizes nothing.
        UnsupportedError: The scheme's blocks are too large for one program.
    """
    scheme = _check_scheme(scheme)
    alike: dict[Any, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    for triple in weights:
        _check(*triple, scheme, smoothing, flag)
        alike[tuple((t.shape, t.stride(), t.dtype, t.device) for t in triple)].append(triple)
    for triples in alike.values():
        weight, out, scale = triples[0]
        geometry = _geometry(weight, scheme)
        addresses = [[tensor.data_ptr() for tensor in triple] for triple in triples]
        if (
            len(triples) == 1
            or weight.numel() == 0
            or (scheme.dynamic and not geometry.one_read)
            or any(w % 16 or o % 16 for w, o, _ in addresses)
            or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            for triple in triples:
                quantize(*triple, scheme=scheme, smoothing=smoothing, flag=flag)
            continue
        with _on(weight.device):
            table = torch.tensor(addresses, pin_memory=weight.is_cuda)
            table = table.to(weight.device, non_blocking=True)
            for start in range(0, len(triples), _MOST_TENSORS):
                part = table[start : start + _MOST_TENSORS]
                grid = (geometry.num_groups(weight.shape), len(part))
                _device_code().quantize_many_kernel[grid](
                    *(part, smoothing, flag),
                    *_sizes(weight, out, scale, geometry),
                    **_constants(scheme, geometry),
                    WEIGHT=_element_type(weight.dtype),
                )


@attrs.frozen(kw_only=True)
class _Geometry:
    """How the device code cuts a weight up: its module's docstring explains groups and tiles.

    Args:
        group: Rows and columns of a group.
        tile: Rows and columns of a tile.
        num_warps: Warps of a program.
        one_read: Whether a group holds all that shares a scale.
    """

    group: tuple[int, int]
    tile: tuple[int, int]
    num_warps: int
    one_read: bool

    def across(self, num_columns: int) -> int:
        """Groups side by side."""
        return -(-num_columns // self.group[1])

    def num_groups(self, shape: tuple[int, ...]) -> int:
        """Groups, and so programs, of a weight of ``shape``."""
        return -(-shape[0] // self.group[0]) * self.across(shape[1])


def _geometry(weight: Tensor, scheme: QuantScheme) -> _Geometry:
    return _choose_geometry(
        scheme.strategy, scheme.block_structure, weight.shape[1], weight.stride(1) == 1
    )


@functools.cache
def _choose_geometry(
    strategy: str, block: tuple[int, int] | None, num_columns: int, rows_are_dense: bool
) -> _Geometry:
    """The fastest seen on an H200; any other gives the same bits."""
    if block is not None:
        num_warps = _power_of_two(min(max(block[0] * block[1] // 2048, 1), 8))
        columns = _power_of_two(block[1])
        rows = min(_power_of_two(block[0]), max(num_warps * _WARP_ELEMENTS // columns, 1))
        return _Geometry(group=block, tile=(rows, columns), num_warps=num_warps, one_read=True)
    if not rows_are_dense:  # Square enough for both the read and the write to be coalesced.
        return _Geometry(group=(32, 128), tile=(32, 128), num_warps=4, one_read=False)
    # The fewest warps that hold a row: the more rows are in flight, the less each waits.
    num_warps = 1
    while num_warps * _WARP_ELEMENTS * _MOST_TILES < num_columns and num_warps < _MOST_WARPS:
        num_warps *= 2
    tile = num_warps * _WARP_ELEMENTS
    num_tiles = min(-(-num_columns // tile), _MOST_TILES)
    return _Geometry(
        group=(1, num_tiles * tile),
        tile=(1, tile),
        num_warps=num_warps,
        one_read=strategy == "channel" and num_columns <= num_tiles * tile,
    )


def _find_scale(
    weight: Tensor,
    scale: Tensor,
    scheme: QuantScheme,
    smoothing: Tensor | None,
    geometry: _Geometry,
) -> None:
    """Find a scale that spans groups: the magnitudes first, then divide them in place."""
    whole = scheme.strategy == "tensor"
    if whole and geometry.group[0] == 1:  # Four rows a program: fewer meet at the one magnitude.
        geometry = attrs.evolve(geometry, group=(4, geometry.group[1]))
    scale.zero_()
    _device_code().amax_kernel[(geometry.num_groups(weight.shape),)](
        *(weight, scale, smoothing),
        *(*weight.shape, geometry.across(weight.shape[1]), *weight.stride(), scale.stride(0)),
        PER_ROW=not whole,
        **_cut(geometry),
    )
    num_scales = scale.shape[0]
    _device_code().finish_scale_kernel[(1 if whole else -(-num_scales // _SCALE_LANES),)](
        *(scale, num_scales, scale.stride(0)),
        QMAX=scheme.qmax,
        SPREAD=whole,
        LANES=_SCALE_LANES,
    )


def _sizes(weight: Tensor, out: Tensor, scale: Tensor, geometry: _Geometry) -> tuple[int, ...]:
    """The kernels' integers: shape, groups side by side, strides."""
    return (
        *(*weight.shape, geometry.across(weight.shape[1]), *weight.stride(), *out.stride()),
        scale.stride(0) if scale.shape[0] > 1 else 0,
        scale.stride(1) if scale.ndim == 2 else 0,
    )


def _constants(scheme: QuantScheme, geometry: _Geometry) -> dict[str, Any]:
    """The kernels' compile-time constants."""
    return {
        "QMAX": scheme.qmax,
        "IS_FLOAT": scheme.type == "float",
        "DYNAMIC": scheme.dynamic and geometry.one_read,
        "PER_ROW": scheme.strategy != "block",
        "EMULATE": _interpreted(),
        **_cut(geometry),
    }


def _cut(geometry: _Geometry) -> dict[str, int | None]:
    """The geometry as the kernels take it."""
    (group_r, group_c), (tile_r, tile_c) = geometry.group, geometry.tile
    return {
        "GROUP_R": group_r,
        "GROUP_C": group_c,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "num_warps": geometry.num_warps,
        "maxnreg": _MOST_REGISTERS if geometry.num_warps >= 8 else None,
    }


def _check_scheme(scheme: str | QuantScheme) -> QuantScheme:
    scheme = get_scheme(scheme)
    if not scheme.quantized:
        raise SchemeError(f"scheme {scheme.name!r} quantizes nothing, so it has no kernel")
    if scheme.block_structure is not None and not _fits(scheme.block_structure):
        raise UnsupportedError(
            f"{scheme.name}: blocks of {scheme.block_structure} are too large for a kernel, which "
            f"holds {_MOST_BLOCK_ELEMENTS} elements; flashrl.core.quantize.quantize_into takes them"
        )
    return scheme


def _check(
    weight: Tensor,
    out: Tensor,
    scale: Tensor,
    scheme: QuantScheme,
    smoothing: Tensor | None,
    flag: Tensor | None,
) -> None:
    """Refuse what would have a kernel read or write outside a tensor."""
    if weight.ndim != 2 or weight.dtype not in _WEIGHT_DTYPES:
        raise ShapeError(
            "weight must be float32, bfloat16 or float16, [out, in]; "
            f"got {weight.dtype} {tuple(weight.shape)}"
        )
    rows, columns = weight.shape
    _check_one("out", out, weight, (rows, columns), scheme.dtype)
    whole = scheme.strategy == "tensor" and scale.ndim == 2
    shape = (rows, 1) if whole else scheme.scale_shape((rows, columns))
    _check_one("scale", scale, weight, shape, torch.float32)
    if smoothing is not None:
        _check_one("smoothing", smoothing, weight, (columns,), smoothing.dtype)
    if flag is not None:
        _check_one("flag", flag, weight, (1,), torch.int32)


def _check_one(
    name: str, tensor: Tensor, weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != weight.device:
        raise ShapeError(
            f"{name} must be {dtype} {shape} on {weight.device} for a weight of shape "
            f"{tuple(weight.shape)}; got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )


def _fits(block: tuple[int, int]) -> bool:
    return _power_of_two(block[0]) * _power_of_two(block[1]) <= _MOST_BLOCK_ELEMENTS


def _power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def _on(device: torch.device) -> Any:
    """Triton launches on the current device: make it the weight's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= _OLDEST_TRITON


@functools.cache
def _device_code() -> Any:
    """The kernels' module; Triton is imported when the first one is launched."""
    return importlib.import_module("flashrl.core.quantize._triton")


def _element_type(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    return getattr(_device_code().tl, str(dtype).removeprefix("torch."))
