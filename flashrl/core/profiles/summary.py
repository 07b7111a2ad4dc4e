"""What a profile holds, in a few numbers, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from flashrl.core.profiles.profile import Profile

__all__ = ["Difference", "compare_profiles", "summarize_profile"]


def summarize_profile(profile: Profile) -> dict[str, Any]:
    """Facts, counts, and the spread of each factor, as plain values.

    Args:
        profile: Any profile.

    Example:
        >>> import torch
        >>> profile = Profile(
        ...     scheme="int8",
        ...     smoothing={"norm.weight": torch.tensor([0.5, 1.0, 4.0])},
        ...     groups={"norm.weight": ["up_proj.weight"]},
        ... )
        >>> summarize_profile(profile)["smoothing"]["norm.weight"]["largest"]
        4.0
    """
    return {
        "scheme": profile.scheme,
        "base_model": profile.base_model,
        "quantized_model": profile.quantized_model,
        "alpha": profile.alpha,
        "norm_offset": profile.norm_offset,
        "num_weights": len(profile.weights),
        "num_static_scales": len(profile.scales),
        "num_smoothed": len(profile.smoothing),
        "smoothing": {
            source: {
                "channels": len(factor),
                "smallest": float(factor.min()),
                "median": float(factor.median()),
                "largest": float(factor.max()),
                "readers": list(profile.groups[source]),
            }
            for source, factor in profile.smoothing.items()
        },
    }


@attrs.frozen(kw_only=True)
class Difference:
    """One thing in which two profiles differ.

    Args:
        what: ``scheme``, ``norm_offset``, ``smoothing``, ``readers``, ``scale`` or ``weight``.
        name: The parameter it is about; empty for a fact about the whole.
        detail: How they differ, in words.
        largest: Largest difference of a value relative to the first profile's, where both have
            values of one shape.
    """

    what: str
    name: str
    detail: str
    largest: float | None = None


def compare_profiles(
    first: Profile, second: Profile, *, tolerance: float = 1e-6
) -> tuple[Difference, ...]:
    """Everything that makes two profiles treat a model differently.

    Where they came from does not count.

    Args:
        first: A profile.
        second: Another.
        tolerance: Largest relative difference of a value that is still none; the two formats round
            differently by about 1e-7.

    Returns:
        One entry a difference, those about the whole first.
    """
    return tuple(_differences(first, second, tolerance))


def _differences(first: Profile, second: Profile, tolerance: float) -> Iterator[Difference]:
    for fact in ("scheme", "norm_offset"):
        ours, theirs = getattr(first, fact), getattr(second, fact)
        if ours != theirs:
            yield Difference(what=fact, name="", detail=f"{ours}, then {theirs}")
    yield from _compare_tensors("smoothing", first.smoothing, second.smoothing, tolerance)
    for source in first.groups.keys() & second.groups.keys():
        changed = sorted({*first.groups[source]} ^ {*second.groups[source]})
        if changed:
            detail = f"in one of them only: {', '.join(changed)}"
            yield Difference(what="readers", name=source, detail=detail)
    yield from _compare_tensors("scale", first.scales, second.scales, tolerance)
    ours, theirs = set(first.weights), set(second.weights)
    for name in sorted(ours ^ theirs):
        yield Difference(what="weight", name=name, detail=_only_in(name in ours))


def _compare_tensors(
    what: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor], tolerance: float
) -> Iterator[Difference]:
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            yield Difference(what=what, name=name, detail=_only_in(name in first))
        elif first[name].shape != second[name].shape:
            detail = f"shape {list(first[name].shape)}, then {list(second[name].shape)}"
            yield Difference(what=what, name=name, detail=detail)
        else:
            largest = float(((second[name] - first[name]).abs() / first[name]).max())
            if largest > tolerance:
                yield Difference(
                    what=what, name=name, detail=f"by up to {largest:.2g}", largest=largest
                )


def _only_in(first: bool) -> str:
    return f"in the {'first' if first else 'second'} only"
