"""The arithmetic of 8 bit: the reference that every kernel and engine must equal, bit for bit.

``scale`` always dequantizes: ``w ≈ q · scale``, with ``scale = amax / qmax``.  Rounding is to
nearest even, int8 never emits -128, fp8 saturates at ±448, and where a whole scale group is zero
the scale is 1.  All arithmetic is float32, whatever the weight's dtype.

Work goes through the weight in slices of rows, so the extra memory is a few MiB for any size.
"""

from __future__ import annotations

from flashrl.core.quantize.reference import (
    clipped_fraction,
    compute_scale,
    dequantize,
    quantize_into,
)

__all__ = ["clipped_fraction", "compute_scale", "dequantize", "quantize_into"]
