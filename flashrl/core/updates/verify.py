"""The proof that an update is right: every tensor the engine holds, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
import torch

from flashrl.core.interfaces import NamedTensors, WeightInfo
from flashrl.core.names import NameIndex, canonical
from flashrl.core.profiles.pruning import DeadChannelPruner
from flashrl.core.profiles.smoothing import find_groups
from flashrl.core.quantize import dequantize, quantize_into
from flashrl.core.schemes import QuantScheme
from flashrl.errors import VerificationError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = ["Comparison", "VerifyReport", "compare", "compute_expected", "make_pruner"]


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
    named_tensors: NamedTensors,
    infos: Mapping[str, WeightInfo],
    *,
    profile: Profile | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the engine must hold after a push, dequantized.

    Args:
        named_tensors: As pushed, under the engine's names.
        infos: How the engine stores each.
        profile: Smoothing factors and static scales the engine applies.

    Yields:
        Each name with its float32 tensor on the CPU, in the order pushed; norms that dead-channel
        pruning may change come last.
    """
    pruner = make_pruner(infos)
    norms: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        expected = _expected(name, tensor.detach().cpu(), infos[name], profile)
        for norm, weight in pruner.load(name, expected).items() if pruner else ():
            norms[norm] = weight
        if pruner is None or canonical(name) not in pruner.groups:
            yield name, expected
    for norm, weight in norms.items():
        yield NameIndex(infos).resolve(norm), weight


def make_pruner(infos: Mapping[str, WeightInfo]) -> DeadChannelPruner | None:
    """The pruner that a set of weights asks for; None without ``prune_dead_neurons``."""
    if not any(info.scheme and info.scheme.prune_dead_neurons for info in infos.values()):
        return None
    groups = find_groups({name: info.shape for name, info in infos.items()})
    return DeadChannelPruner(
        groups={norm: readers for norm, readers in groups.items() if "norm" in norm}
    )


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


def _expected(
    name: str, tensor: torch.Tensor, info: WeightInfo, profile: Profile | None
) -> torch.Tensor:
    if profile is not None:
        tensor = profile.smooth(name, tensor, dtype=torch.float32)
    if info.scheme is None:
        return tensor.to(info.dtype).float()
    static = None if info.scheme.dynamic or profile is None else profile.scale_for(name)
    return torch.cat(
        [
            _round_trip(shard, info.scheme, name, static=static)
            for shard in tensor.chunk(info.num_input_shards, dim=1)
        ],
        dim=1,
    )


def _round_trip(
    weight: torch.Tensor, scheme: QuantScheme, name: str, *, static: torch.Tensor | None
) -> torch.Tensor:
    quantized = torch.empty(weight.shape, dtype=scheme.dtype)
    scale = torch.empty(scheme.scale_shape(weight.shape)) if static is None else static
    quantize_into(weight, quantized, scale, scheme=scheme, name=name)
    return dequantize(quantized, scale, scheme=scheme)
