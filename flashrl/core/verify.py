"""The proof that an update is right: every tensor the engine holds, against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from flashrl.core.interfaces import WeightInfo
from flashrl.core.quantize import dequantize, quantize_into
from flashrl.core.schemes import QuantScheme
from flashrl.errors import VerificationError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["Comparison", "VerifyReport", "compare", "compute_expected"]


@attrs.frozen(kw_only=True)
class Comparison:
    """One tensor of the engine against the reference.

    Args:
        name: Checkpoint name.
        scheme: Name of the scheme it is stored in, or the dtype's name.
        equal: Bit for bit.
        max_abs_error: Largest absolute difference; 0 when equal, NaN when it never came.
        differing: Number of elements that differ.
    """

    name: str
    scheme: str
    equal: bool
    max_abs_error: float = 0.0
    differing: int = 0


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What :meth:`Session.verify` found.

    Args:
        version: The weight version that was verified.
        comparisons: One a tensor, in the engine's order.
    """

    version: int | None
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether there was something to compare, and all of it is equal."""
        return bool(self.comparisons) and all(c.equal for c in self.comparisons)

    @property
    def mismatches(self) -> tuple[Comparison, ...]:
        """The tensors that differ."""
        return tuple(c for c in self.comparisons if not c.equal)

    def raise_for_mismatch(self) -> None:
        """Raise unless :attr:`ok`.

        Raises:
            VerificationError: Names the tensors that differ.
        """
        if self.ok:
            return
        lines = [
            f"{c.name} ({c.scheme}): {c.differing} elements differ, by up to {c.max_abs_error:.3g}"
            for c in self.mismatches[:8]
        ]
        if len(self.mismatches) > 8:
            lines.append(f"and {len(self.mismatches) - 8} more")
        raise VerificationError(
            f"{len(self.mismatches)} of {len(self.comparisons)} tensors in the engine are not "
            "those given:\n  " + "\n  ".join(lines or ["there was nothing to compare"]),
            report=self,
        )


def compute_expected(
    name: str, tensor: torch.Tensor, info: WeightInfo, *, profile: Profile | None = None
) -> torch.Tensor:
    """What the engine must hold for a pushed tensor, dequantized.

    Args:
        name: Checkpoint name.
        tensor: As pushed, of ``info.shape``.
        info: How the engine stores it.
        profile: Smoothing factors and static scales the engine applies.

    Returns:
        float32 on the CPU.
    """
    tensor = tensor.detach().cpu()
    if info.scheme is None:
        return tensor.to(info.dtype).float()
    shards = tensor.chunk(info.num_input_shards, dim=1)
    return torch.cat([_round_trip(shard, info.scheme, name) for shard in shards], dim=1)


def compare(
    name: str, actual: torch.Tensor, expected: torch.Tensor, info: WeightInfo
) -> Comparison:
    """Compare one tensor, bit for bit."""
    different = actual != expected
    differing = int(different.sum())
    return Comparison(
        name=name,
        scheme=info.scheme.name if info.scheme else str(info.dtype).removeprefix("torch."),
        equal=differing == 0,
        max_abs_error=float((actual - expected).abs().max()) if differing else 0.0,
        differing=differing,
    )


def _round_trip(weight: torch.Tensor, scheme: QuantScheme, name: str) -> torch.Tensor:
    quantized = torch.empty(weight.shape, dtype=scheme.dtype)
    scale = torch.empty(scheme.scale_shape(weight.shape))
    quantize_into(weight, quantized, scale, scheme=scheme, name=name)
    return dequantize(quantized, scale, scheme=scheme)
