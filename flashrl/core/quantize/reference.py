"""The arithmetic itself, which every kernel and engine must equal, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashrl.core.quantize import kernels
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.errors import NonFiniteError, SchemeError, ShapeError

__all__ = ["clipped_fraction", "compute_scale", "dequantize", "quantize_into"]

_SLICE_ELEMENTS = 1 << 20
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compute_scale(
    weight: Tensor,
    scheme: str | QuantScheme,
    *,
    out: Tensor | None = None,
    smoothing: Tensor | None = None,
    name: str = "weight",
) -> Tensor:
    """The scale of a weight: the largest magnitude of each scale group over ``qmax``.

    Args:
        weight: fp32, bf16 or fp16, [out, in], any strides.
        scheme: What shares a scale, and the 8-bit type.
        out: float32 destination; a new tensor without it.
        smoothing: Factor per input channel that multiplies the weight first, (in,).
        name: The tensor's name, for errors.

    Returns:
        float32, shaped as :meth:`QuantScheme.scale_shape` says.

    Raises:
        NonFiniteError: The weight holds NaN or infinity; ``out`` is untouched.
        ShapeError: A shape or dtype does not fit.

    Example:
        >>> compute_scale(torch.tensor([[1.0, -254.0], [0.0, 0.0]]), "int8").flatten().tolist()
        [2.0, 1.0]
    """
    scheme = _quantizing(scheme)
    _check_weight(weight, smoothing, name)
    shape = scheme.scale_shape(weight.shape)
    if out is not None and (tuple(out.shape) != shape or out.dtype != torch.float32):
        raise ShapeError(
            f"{name}: scale must be float32 {shape}, got {out.dtype} {tuple(out.shape)}"
        )
    amax = _compute_amax(weight, scheme, smoothing)
    if not torch.isfinite(amax).all():
        raise NonFiniteError(
            f"{name} holds NaN or infinity; nothing was written. "
            "Check the trainer's weights: a diverged step often shows here first"
        )
    # By a tensor: CUDA divides by a number as it multiplies by its reciprocal, with other bits.
    scale = amax / torch.full_like(amax, scheme.qmax)
    scale[scale == 0] = 1.0
    return scale if out is None else out.copy_(scale)


def quantize_into(
    weight: Tensor,
    out: Tensor,
    scale: Tensor,
    *,
    scheme: str | QuantScheme,
    smoothing: Tensor | None = None,
    flag: Tensor | None = None,
    name: str = "weight",
) -> None:
    """Quantize a weight into storage that exists already, scale included.

    On a GPU that :mod:`flashrl.core.quantize.kernels` knows, a fused kernel does it with the same
    bits.

    Args:
        weight: fp32, bf16 or fp16, [out, in], any strides.
        out: 8-bit destination of the scheme's dtype, [out, in], any strides.
        scale: float32.  Written when ``scheme.dynamic``, read as it stands otherwise.  With
            ``strategy="tensor"`` it may also be (out, 1), the same value in every row, so that
            shards of a fused layer sit side by side.
        scheme: What shares a scale, and the 8-bit type.
        smoothing: Factor per input channel that multiplies the weight first, (in,).
        flag: int32, (1,), on the weight's device.  With it nothing waits for a GPU: what is not
            finite sets the flag to 1 instead of raising, and leaves the destination undefined.
        name: The tensor's name, for errors.

    Raises:
        NonFiniteError: The weight (or a static scale) is not finite, and there is no ``flag``;
            nothing was written.
        ShapeError: A shape or dtype does not fit; nothing was written.

    Example:
        >>> q, scale = torch.empty(1, 2, dtype=torch.int8), torch.empty(1, 1)
        >>> quantize_into(torch.tensor([[0.5, -1.0]]), q, scale, scheme="int8")
        >>> q.tolist(), round(scale.item(), 6)
        ([[64, -127]], 0.007874)
    """
    scheme = _quantizing(scheme)
    _check_weight(weight, smoothing, name)
    _check_destination(weight, out, scale, scheme, name)
    if weight.is_cuda and kernels.available(weight.device, scheme):
        if flag is None:
            _check_finite(weight, scale, scheme, smoothing, name)
        kernels.quantize(weight, out, scale, scheme=scheme, smoothing=smoothing, flag=flag)
        return
    try:
        fresh = compute_scale(weight, scheme, smoothing=smoothing, name=name)
        if scheme.dynamic:
            scale.copy_(fresh)
        else:
            _check_static_scale(scale, name)
    except NonFiniteError:
        if flag is None:
            raise
        flag.fill_(1)
        return
    for rows, values in _slices(weight, scheme, smoothing):
        values.div_(_rows_of(scale, rows, weight.shape, scheme))
        if scheme.type == "int":
            values.round_()
        out[rows].copy_(values.clamp_(-scheme.qmax, scheme.qmax))


def dequantize(
    quantized: Tensor,
    scale: Tensor,
    *,
    scheme: str | QuantScheme,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight that the 8-bit values stand for, ``q · scale``.

    Args:
        quantized: int8 or fp8 e4m3fn, [out, in].  -128 is accepted.
        scale: float32, shaped as in :func:`quantize_into`.
        scheme: What shares a scale.
        dtype: dtype of the result; the product itself is float32.

    Returns:
        [out, in] in ``dtype``.

    Raises:
        ShapeError: The scale does not fit.
    """
    scheme = _quantizing(scheme)
    _check_scale(quantized, scale, scheme, "weight")
    result = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    for rows, values in _slices(quantized, scheme, None):
        result[rows].copy_(values.mul_(_rows_of(scale, rows, quantized.shape, scheme)))
    return result


def clipped_fraction(weight: Tensor, scale: Tensor, *, scheme: str | QuantScheme) -> float:
    """Fraction of the elements that a scale saturates: those that would round past ``qmax``.

    Args:
        weight: fp32, bf16 or fp16, [out, in].
        scale: float32, shaped as in :func:`quantize_into`.
        scheme: What shares a scale, and the 8-bit type.

    Returns:
        Between 0 and 1; 0 for every dynamic scale.

    Raises:
        ShapeError: The scale does not fit.

    Example:
        >>> clipped_fraction(torch.tensor([[1.6, 0.1]]), torch.full((1, 1), 0.01), scheme="int8")
        0.5
    """
    scheme = _quantizing(scheme)
    _check_weight(weight, None, "weight")
    _check_scale(weight, scale, scheme, "weight")
    # Half a step past qmax: the last e4m3fn step is 32 wide, the last int8 step 1.
    limit = scheme.qmax + (0.5 if scheme.type == "int" else 16.0)
    clipped = sum(
        int((values.div_(_rows_of(scale, rows, weight.shape, scheme)).abs_() > limit).sum())
        for rows, values in _slices(weight, scheme, None)
    )
    return clipped / max(weight.numel(), 1)


def _quantizing(scheme: str | QuantScheme) -> QuantScheme:
    scheme = get_scheme(scheme)
    if not scheme.quantized:
        raise SchemeError(f"scheme {scheme.name!r} quantizes nothing, so it has no scale")
    return scheme


def _check_weight(weight: Tensor, smoothing: Tensor | None, name: str) -> None:
    if weight.dtype not in _WEIGHT_DTYPES:
        raise ShapeError(f"{name} must be float32, bfloat16 or float16, got {weight.dtype}")
    if weight.ndim != 2:
        raise ShapeError(f"{name} must be [out, in], got shape {tuple(weight.shape)}")
    if smoothing is not None and tuple(smoothing.shape) != (weight.shape[1],):
        raise ShapeError(
            f"{name}: smoothing must have one factor an input channel, ({weight.shape[1]},), "
            f"got {tuple(smoothing.shape)}"
        )


def _check_destination(
    weight: Tensor, out: Tensor, scale: Tensor, scheme: QuantScheme, name: str
) -> None:
    if out.shape != weight.shape or out.dtype != scheme.dtype:
        raise ShapeError(
            f"{name}: {scheme.name} needs a {scheme.dtype} destination of shape "
            f"{tuple(weight.shape)}, got {out.dtype} {tuple(out.shape)}"
        )
    _check_scale(weight, scale, scheme, name)


def _check_finite(
    weight: Tensor, scale: Tensor, scheme: QuantScheme, smoothing: Tensor | None, name: str
) -> None:
    """Raise what the reference would, before a kernel writes."""
    quick = smoothing is None and weight.numel() > 0
    low, high = torch.aminmax(weight) if quick else (torch.nan, torch.nan)
    if not math.isfinite(high - low):
        compute_scale(weight, scheme, smoothing=smoothing, name=name)
    if not scheme.dynamic:
        _check_static_scale(scale, name)


def _check_static_scale(scale: Tensor, name: str) -> None:
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise NonFiniteError(f"{name}: a static scale must be finite and positive")


def _check_scale(weight: Tensor, scale: Tensor, scheme: QuantScheme, name: str) -> None:
    allowed = [scheme.scale_shape(weight.shape)]
    if scheme.strategy == "tensor":
        allowed.append((weight.shape[0], 1))
    if tuple(scale.shape) not in allowed or scale.dtype != torch.float32:
        raise ShapeError(
            f"{name}: {scheme.name} needs a float32 scale of shape "
            f"{' or '.join(map(str, allowed))}, got {scale.dtype} {tuple(scale.shape)}"
        )


def _compute_amax(weight: Tensor, scheme: QuantScheme, smoothing: Tensor | None) -> Tensor:
    """Largest magnitude of each scale group, float32; NaN and infinity carry through."""
    amax = torch.zeros(scheme.scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    for rows, values in _slices(weight, scheme, smoothing):
        magnitude = values.abs_()
        if scheme.strategy == "tensor":
            torch.maximum(amax, magnitude.amax(), out=amax)
        elif scheme.block_structure is None:
            amax[rows] = magnitude.amax(dim=1, keepdim=True)
        else:
            r, c = scheme.block_structure
            padding = (0, -magnitude.shape[1] % c, 0, -magnitude.shape[0] % r)
            padded = torch.nn.functional.pad(magnitude, padding)
            tiles = padded.view(padded.shape[0] // r, r, padded.shape[1] // c, c)
            amax[rows.start // r : -(-rows.stop // r)] = tiles.amax((1, 3))
    return amax


def _slices(
    tensor: Tensor, scheme: QuantScheme, smoothing: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows as fresh float32 tensors, cut where blocks are."""
    rows, columns = tensor.shape
    if columns == 0:
        return
    step = max(1, _SLICE_ELEMENTS // columns)
    if scheme.block_structure is not None:
        block_rows = scheme.block_structure[0]
        step = max(step // block_rows, 1) * block_rows
    for start in range(0, rows, step):
        where = slice(start, min(start + step, rows))
        values = tensor[where].to(torch.float32, copy=True)
        yield where, values if smoothing is None else values.mul_(smoothing.float())


def _rows_of(scale: Tensor, rows: slice, shape: torch.Size, scheme: QuantScheme) -> Tensor:
    """The scale of those rows, broadcastable against them."""
    if scheme.block_structure is None:
        return scale if scale.ndim == 1 else scale[rows]
    r, c = scheme.block_structure
    blocks = scale[rows.start // r : -(-rows.stop // r)]
    expanded = blocks.repeat_interleave(r, dim=0).repeat_interleave(c, dim=1)
    return expanded[: rows.stop - rows.start, : shape[1]]
