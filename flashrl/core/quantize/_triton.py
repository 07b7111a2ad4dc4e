"""The device code of :mod:`flashrl.core.quantize.kernels`; importing it imports Triton.

A program owns one *group* of the weight, ``GROUP_R`` rows by ``GROUP_C`` columns, and walks it in
*tiles* of ``TILE_R`` by ``TILE_C``.  The tiles are read once and stay in registers between the
search for the largest magnitude and the division by the scale that follows from it.  Where a scale
spans more than one group, it is found first (``amax_kernel``, ``finish_scale_kernel``) and
``quantize_kernel`` reads it like a static one: two reads of the weight.
"""

# ruff: noqa: N803, N806  (Triton writes its compile-time constants in capitals)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

_SIGN = tl.constexpr(-(2**31))
_INFINITY = tl.constexpr(0x7F800000)
_MANTISSA = tl.constexpr(0x7FFFFF)
# Adding 1.5 · 2**23 leaves a float32 rounded to an integer, half to even, in its low mantissa bits.
_ROUND_TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def quantize_kernel(
    weight, out, scale, smoothing, flag, num_rows, num_columns, groups_across,
    weight_row, weight_column, out_row, out_column, scale_row, scale_column,
    QMAX: tl.constexpr, IS_FLOAT: tl.constexpr, DYNAMIC: tl.constexpr, PER_ROW: tl.constexpr,
    EMULATE: tl.constexpr,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Quantize a weight, a group a program."""
    _quantize_group(
        weight, out, scale, smoothing, flag, num_rows, num_columns, groups_across,
        weight_row, weight_column, out_row, out_column, scale_row, scale_column,
        QMAX, IS_FLOAT, DYNAMIC, PER_ROW, EMULATE, GROUP_R, GROUP_C, TILE_R, TILE_C,
    )  # fmt: skip


@triton.jit
def quantize_many_kernel(
    table, smoothing, flag, num_rows, num_columns, groups_across,
    weight_row, weight_column, out_row, out_column, scale_row, scale_column,
    WEIGHT: tl.constexpr,
    QMAX: tl.constexpr, IS_FLOAT: tl.constexpr, DYNAMIC: tl.constexpr, PER_ROW: tl.constexpr,
    EMULATE: tl.constexpr,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Quantize weights of one shape, whose addresses (weight, out, scale) are a row of a table."""
    OUT: tl.constexpr = tl.float8e4nv if IS_FLOAT else tl.int8
    entry = table + tl.program_id(1) * 3
    weight = tl.load(entry).to(tl.pointer_type(WEIGHT))
    out = tl.load(entry + 1).to(tl.pointer_type(OUT))
    scale = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    _quantize_group(
        tl.multiple_of(weight, 16), tl.multiple_of(out, 16), scale,
        smoothing, flag, num_rows, num_columns, groups_across,
        weight_row, weight_column, out_row, out_column, scale_row, scale_column,
        QMAX, IS_FLOAT, DYNAMIC, PER_ROW, EMULATE, GROUP_R, GROUP_C, TILE_R, TILE_C,
    )  # fmt: skip


@triton.jit
def amax_kernel(
    weight, scale, smoothing, num_rows, num_columns, groups_across,
    weight_row, weight_column, scale_row,
    PER_ROW: tl.constexpr,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Raise ``scale`` (zero at first) to the largest magnitude, each row's or the tensor's."""
    group_r = tl.program_id(0) // groups_across
    group_c = tl.program_id(0) % groups_across
    _, peak = _read_tiles(
        weight, smoothing, group_r, group_c, num_rows, num_columns, weight_row, weight_column,
        GROUP_R, GROUP_C, TILE_R, TILE_C,
    )  # fmt: skip
    peak = _reduce(peak, PER_ROW)
    # Magnitudes order as their bits do, so an integer maximum serves, with NaN above infinity.
    bits = scale.to(tl.pointer_type(tl.int32), bitcast=True)
    if PER_ROW:
        rows = group_r * GROUP_R + tl.arange(0, TILE_R)
        tl.atomic_max(bits + rows.to(tl.int64) * scale_row, peak, mask=rows < num_rows)
    else:
        tl.atomic_max(bits, tl.max(peak, axis=0))


@triton.jit
def finish_scale_kernel(
    scale, num_scales, scale_row, QMAX: tl.constexpr, SPREAD: tl.constexpr, LANES: tl.constexpr
):
    """Turn magnitudes into scales in place; with ``SPREAD``, the first one's into all."""
    if SPREAD:
        value = _to_scale(tl.load(scale).to(tl.int32, bitcast=True), QMAX)
        tl.debug_barrier()  # Every thread has read the magnitude before any overwrites it.
        for start in range(0, num_scales, LANES):
            index = start + tl.arange(0, LANES)
            at = scale + index.to(tl.int64) * scale_row
            tl.store(at, tl.zeros((LANES,), tl.float32) + value, mask=index < num_scales)
    else:
        index = tl.program_id(0) * LANES + tl.arange(0, LANES)
        at = scale + index.to(tl.int64) * scale_row
        peak = tl.load(at, mask=index < num_scales, other=0.0).to(tl.int32, bitcast=True)
        tl.store(at, _to_scale(peak, QMAX), mask=index < num_scales)


@triton.jit
def _quantize_group(
    weight, out, scale, smoothing, flag, num_rows, num_columns, groups_across,
    weight_row, weight_column, out_row, out_column, scale_row, scale_column,
    QMAX: tl.constexpr, IS_FLOAT: tl.constexpr, DYNAMIC: tl.constexpr, PER_ROW: tl.constexpr,
    EMULATE: tl.constexpr,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Quantize the program's group; find its scale first if ``DYNAMIC``, else read it."""
    pid = tl.program_id(0)
    if not DYNAMIC:  # Backwards: what the search for the scale read last is still in the cache.
        pid = tl.num_programs(0) - 1 - pid
    group_r = pid // groups_across
    group_c = pid % groups_across
    tiles, peak = _read_tiles(
        weight, smoothing, group_r, group_c, num_rows, num_columns, weight_row, weight_column,
        GROUP_R, GROUP_C, TILE_R, TILE_C,
    )  # fmt: skip
    peak = _reduce(peak, PER_ROW)
    bad = peak >= _INFINITY

    lanes = tl.arange(0, TILE_R)
    if PER_ROW:
        rows = group_r * GROUP_R + lanes
        scale_at = scale + rows.to(tl.int64) * scale_row
        scale_mask = rows < num_rows
    else:
        scale_at = scale + group_r * scale_row + group_c * scale_column + lanes * 0
        scale_mask = lanes >= 0
    if DYNAMIC:
        divisor = _to_scale(peak, QMAX)
        tl.store(scale_at, divisor, mask=scale_mask)
    else:
        divisor = tl.load(scale_at, mask=scale_mask, other=1.0)
    bits = divisor.to(tl.int32, bitcast=True)
    bad = bad | (bits <= 0) | (bits >= _INFINITY)
    if flag is not None:
        tl.store(flag, 1, mask=_any(bad))

    # See _write_tiles: scales that its short division does not suit.
    odd = (divisor < 2.0**-60) | (divisor > 2.0**60) | ((bits & _MANTISSA) == _MANTISSA)
    if _any(odd):
        _write_tiles(
            tiles, out, divisor, group_r, group_c, num_rows, num_columns, out_row, out_column,
            QMAX, IS_FLOAT, True, True, EMULATE, GROUP_R, GROUP_C, TILE_R, TILE_C,
        )  # fmt: skip
    else:
        _write_tiles(
            tiles, out, divisor, group_r, group_c, num_rows, num_columns, out_row, out_column,
            QMAX, IS_FLOAT, not DYNAMIC, False, EMULATE, GROUP_R, GROUP_C, TILE_R, TILE_C,
        )  # fmt: skip


@triton.jit
def _read_tiles(
    weight, smoothing, group_r, group_c, num_rows, num_columns, weight_row, weight_column,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """The group's tiles in float32, and elementwise over them the largest magnitude."""
    tiles = ()
    peak = tl.zeros((TILE_R, TILE_C), tl.float32)
    for r in tl.static_range(0, GROUP_R, TILE_R):
        for c in tl.static_range(0, GROUP_C, TILE_C):
            rows, columns, mask = _place(
                group_r, group_c, r, c, num_rows, num_columns, GROUP_R, GROUP_C, TILE_R, TILE_C
            )
            at = weight + rows[:, None] * weight_row + columns[None, :] * weight_column
            values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if smoothing is not None:
                factors = tl.load(smoothing + columns, mask=columns < num_columns, other=1.0)
                values = values * factors.to(tl.float32)[None, :]
            peak = tl.maximum(peak, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
            tiles = tiles + (values,)  # noqa: RUF005  (Triton knows no starred tuples)
    return tiles, peak


@triton.jit
def _write_tiles(
    tiles, out, scale, group_r, group_c, num_rows, num_columns, out_row, out_column,
    QMAX: tl.constexpr, IS_FLOAT: tl.constexpr,
    CLAMP: tl.constexpr, ODD: tl.constexpr, EMULATE: tl.constexpr,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Divide the tiles by their scale (one a row), round, and store.

    The 8 bits are those of an IEEE division.  A reciprocal in two parts gives the quotient within
    2**-46 of itself, rounded once.  That picks the wrong float only where the quotient lies as
    close to the middle of two, and the 8 bits follow only if one of the two is a tie between 8-bit
    values.  All such quotients can be listed (``close_calls`` in the tests does): the one that goes
    wrong is a power of two over a scale whose mantissa is all ones.  Such an ``ODD`` scale costs a
    fused correction, which makes the quotient IEEE's itself (Markstein 1990, IBM Journal of
    Research and Development 34).

    Scales near over- and underflow are odd as well: a power of two brings them near 1 first, and
    the values with them.  Values saturate before the division, where nothing can overflow; after
    the rounding that is the same.
    """
    across: tl.constexpr = (GROUP_C + TILE_C - 1) // TILE_C
    limit = (scale * QMAX)[:, None]
    power = tl.full(scale.shape, 1.0, tl.float32)
    if ODD:
        exponent = scale.to(tl.int32, bitcast=True) >> 23
        power = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    divisor = scale * power
    inverse = tl.div_rn(1.0, divisor)
    rest = (tl.fma(inverse, -divisor, 1.0) * inverse)[:, None]
    power = power[:, None]
    divisor = divisor[:, None]
    inverse = inverse[:, None]
    for r in tl.static_range(0, GROUP_R, TILE_R):
        for c in tl.static_range(0, GROUP_C, TILE_C):
            rows, columns, mask = _place(
                group_r, group_c, r, c, num_rows, num_columns, GROUP_R, GROUP_C, TILE_R, TILE_C
            )
            values = tiles[r // TILE_R * across + c // TILE_C]
            if CLAMP:
                values = tl.minimum(tl.maximum(values, -limit), limit)
            if ODD:
                values = values * power
            quotient = tl.fma(values, inverse, values * rest)
            if ODD:
                quotient = tl.fma(tl.fma(quotient, -divisor, values), inverse, quotient)
            at = out + rows[:, None] * out_row + columns[None, :] * out_column
            if IS_FLOAT:
                if EMULATE:
                    quotient = _round_to_e4m3(quotient)
                sign = values.to(tl.int32, bitcast=True) & _SIGN  # -0 stays -0.
                signed = (quotient.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
                tl.store(at, signed.to(tl.float8e4nv), mask=mask)
            else:
                rounded = (quotient + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True)
                tl.store(at, rounded.to(tl.int8), mask=mask)


@triton.jit
def _place(
    group_r, group_c, r, c, num_rows, num_columns,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Rows, columns and mask of the tile that starts at (r, c) inside its group."""
    rows = group_r * GROUP_R + r + tl.arange(0, TILE_R)
    columns = group_c * GROUP_C + c + tl.arange(0, TILE_C)
    row_mask = rows < num_rows
    if GROUP_R % TILE_R != 0:
        row_mask = row_mask & (rows < (group_r + 1) * GROUP_R)
    column_mask = columns < num_columns
    if GROUP_C % TILE_C != 0:
        column_mask = column_mask & (columns < (group_c + 1) * GROUP_C)
    # 64 bits, for their products with strides.
    return rows.to(tl.int64), columns.to(tl.int64), row_mask[:, None] & column_mask[None, :]


@triton.jit
def _reduce(peak, PER_ROW: tl.constexpr):
    """Bits of the largest magnitude of each row, or of the tile in every row."""
    bits = tl.max(peak.to(tl.int32, bitcast=True), axis=1)
    return bits if PER_ROW else bits * 0 + tl.max(bits, axis=0)


@triton.jit
def _to_scale(bits, QMAX: tl.constexpr):
    """``amax / qmax``, and 1 where that is 0."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), QMAX)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _any(condition):
    return tl.max(condition.to(tl.int32), axis=0) > 0


@triton.jit
def _round_to_e4m3(values):
    """Round to the e4m3fn grid, half to even, as hardware casts and Triton's interpreter does not.

    The grid is 2**-3 of the value's binade, and never finer than 2**-9.
    """
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)
    shift = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (values + shift) - shift
