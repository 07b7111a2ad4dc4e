"""Profiles made from checkpoints and activations, and how far weights have drifted from one.

Everything here reads one tensor at a time, and from a pair of checkpoints a large one some rows at
a time, so that the memory it needs does not grow with the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor

from flashrl.core.names import LayerRules, canonical
from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.core.profiles.matrices import read_matrix
from flashrl.core.profiles.profile import Profile
from flashrl.core.profiles.recovery import Recovery
from flashrl.core.profiles.smoothing import compute_smoothing, find_groups, norm_offset
from flashrl.core.quantize import clipped_fraction, compute_scale, dequantize, quantize_into
from flashrl.core.schemes import QuantScheme, get_scheme
from flashrl.errors import ProfileError

__all__ = [
    "Drift",
    "Progress",
    "profile_from_activations",
    "profile_from_checkpoints",
    "report_drift",
]

Progress = Callable[[int, int, str], None]
"""Called after each tensor with how many are done, how many there are, and its name."""


def profile_from_checkpoints(
    base: str | Path | Checkpoint,
    quantized: str | Path | Checkpoint,
    *,
    static_scales: bool = True,
    tolerance: float = 0.25,
    progress: Progress | None = None,
) -> Profile:
    """Recover smoothing factors and scales from a checkpoint and its quantized copy.

    A norm's factor is the ratio of its weights.  Where both are zero, the columns of the weights
    that read the channel tell, and where those are zero too it is 1.  ``up_proj`` and ``v_proj``
    are fitted row by row, and the fit is believed if it explains the weight that reads them.

    Args:
        base: The BF16 checkpoint: a folder, a file, or an open one.
        quantized: Its int8 or fp8 copy in compressed-tensors' format, smoothed or not.
        static_scales: Keep the copy's scales too.
        tolerance: Largest error of a dequantized weight, relative to its norm, at which the copy is
            still taken for one of ``base``.
        progress: Called after each tensor.

    Raises:
        UnknownNameError: The base lacks weights that the copy has.
        ProfileError: A weight is not that of the base, or its scale is no scale.
    """
    base, quantized = _opened(base), _opened(quantized)
    scheme = quantized.weight_scheme()
    weights = quantized.quantized_weights()
    groups = find_groups({name: header.shape for name, header in base.headers.items()})
    source_of = {reader: source for source, readers in groups.items() for reader in readers}
    offset = norm_offset(base.config)
    norms = {source: None for source in groups if len(base.header(source).shape) == 1}
    matrices = dict.fromkeys([*weights, *(name for name in source_of if name in quantized)])
    # What reads the rows of another weight comes after it.
    order = sorted(matrices, key=lambda name: source_of.get(name) in matrices)
    report = _counting(progress, len(norms) + len(order))
    recovery = Recovery(offset=offset)
    scales: dict[str, Tensor] = {}
    for norm in norms:
        recovery.compare_norms(norm, base.tensor(norm), quantized.tensor(norm))
        report(norm)
    for name in order:
        scale = _read_scale(quantized, name, scheme)
        shape, copy_shape = base.header(name).shape, quantized.header(name).shape
        if shape != copy_shape:
            raise ProfileError(
                f"{name} is {list(shape)} in {base.path}, {list(copy_shape)} in {quantized.path}"
            )
        weight = read_matrix(base, name)
        copy = read_matrix(quantized, name, scale=scale, scheme=scheme)
        if scale is not None:
            scales[name] = scale
        errors = recovery.explain(
            name, weight, copy, source=source_of.get(name), is_source=name in groups
        )
        for checked, error in errors.items():
            if not error <= tolerance:
                raise ProfileError(
                    f"{checked} of {quantized.path} is off by {error:.0%} of the weight that it "
                    f"should stand for (allowed: {tolerance:.0%}); is {base.path} the checkpoint "
                    "it was quantized from?"
                )
        report(name)
    found = {source: factor for source, factor in recovery.factors.items() if factor.believed}
    return Profile(
        scheme=scheme.name,
        smoothing={source: factor.resolve() for source, factor in found.items()},
        groups={source: groups[source] for source in found},
        scales=scales if static_scales else {},
        weights=weights,
        norm_offset=offset,
        base_model=str(base.path),
        quantized_model=str(quantized.path),
    )


def profile_from_activations(
    checkpoint: str | Path | Checkpoint,
    activation_amax: Mapping[str, Tensor],
    *,
    scheme: str | QuantScheme = "int8",
    alpha: float = 0.5,
    static_scales: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Compute SmoothQuant's factors for every norm (arXiv 2211.10438).

    Args:
        checkpoint: The BF16 checkpoint: a folder, a file, or an open one.
        activation_amax: Largest magnitude of each channel, (channels,), by the weight name of the
            norm that puts the channels out or of a linear layer that reads them, as
            :func:`~flashrl.core.profiles.smoothing.collect_activation_amax` yields.
        scheme: What the profile is for.
        alpha: How much moves into the weights, from 0 to 1; more for larger outliers.
        static_scales: Keep the scales of the smoothed weights too.
        progress: Called after each tensor.

    Raises:
        ProfileError: Some norms have no statistics.
        NonFiniteError: A statistic or a weight holds NaN or infinity.
    """
    checkpoint, scheme = _opened(checkpoint), get_scheme(scheme)
    rules = LayerRules.from_scheme(scheme)
    shapes = {canonical(name): header.shape for name, header in checkpoint.headers.items()}
    weights = {
        name: None
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and rules.matches(name)
    }
    groups = {
        source: readers
        for source, readers in find_groups(shapes).items()
        if len(shapes[source]) == 1 and not weights.keys().isdisjoint(readers)
    }
    statistics = {canonical(name): amax for name, amax in activation_amax.items()}
    lacking = [
        source for source, readers in groups.items() if not {source, *readers} & statistics.keys()
    ]
    if lacking:
        raise ProfileError(
            f"no activation statistics for {len(lacking)} of {len(groups)} norms, such as "
            f"{lacking[0]}; run the model on a few prompts under collect_activation_amax"
        )
    num_readers = sum(map(len, groups.values()))
    report = _counting(progress, num_readers + (len(weights) if static_scales else 0))
    smoothing = {}
    for source, readers in groups.items():
        seen = [source] if source in statistics else [r for r in readers if r in statistics]
        activations = torch.stack([statistics[name].float().cpu() for name in seen]).amax(0)
        weight_amax = torch.zeros(shapes[source])
        for reader in readers:
            magnitude = checkpoint.tensor(reader).abs().flatten(0, -2).amax(0)
            weight_amax = torch.maximum(weight_amax, magnitude.float())
            report(reader)
        smoothing[source] = compute_smoothing(activations, weight_amax, alpha=alpha)
    profile = Profile(
        scheme=scheme.name,
        smoothing=smoothing,
        groups=groups,
        weights=list(weights),
        norm_offset=norm_offset(checkpoint.config),
        base_model=str(checkpoint.path),
        alpha=alpha,
    )
    if not static_scales:
        return profile
    scales = {}
    for name in weights:
        smoothed = profile.smooth(name, checkpoint.tensor(name), dtype=torch.float32)
        scales[name] = compute_scale(smoothed, scheme, name=name)
        report(name)
    return attrs.evolve(profile, scales=scales)


@attrs.frozen(kw_only=True)
class Drift:
    """How one weight has moved away from its static scale.

    Args:
        name: The weight's name.
        clipped_fraction: Fraction of its elements that the static scale saturates.
        static_error: Error of the weight quantized with the static scale, relative to its norm.
        dynamic_error: The same with a scale computed anew.
    """

    name: str
    clipped_fraction: float
    static_error: float
    dynamic_error: float


def report_drift(
    profile: Profile,
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    progress: Progress | None = None,
) -> tuple[Drift, ...]:
    """Compare a profile's static scales with dynamic ones on today's weights.

    Args:
        profile: With static scales.
        named_tensors: The weights: ``model.named_parameters()``, or an open :class:`Checkpoint`.
        progress: Called after each weight that has a static scale.

    Returns:
        One entry a weight that has a static scale, in the order given.

    Raises:
        ProfileError: The profile has no static scale for any of the weights.

    Example:
        >>> profile = Profile(scheme="int8", scales={"proj.weight": torch.full((1, 1), 0.01)})
        >>> (drift,) = report_drift(profile, [("proj.weight", torch.tensor([[1.6, 0.1]]))])
        >>> drift.clipped_fraction, drift.static_error > 0.2, drift.dynamic_error < 0.01
        (0.5, True, True)
    """
    scheme = get_scheme(profile.scheme).evolve(dynamic=False)
    report = _counting(progress, len(profile.scales))
    drifts = []
    for name, tensor in named_tensors:
        scale = profile.scale_for(name)
        if scale is None:
            continue
        weight = profile.smooth(name, tensor.detach().cpu(), dtype=torch.float32)
        drifts.append(
            Drift(
                name=canonical(name),
                clipped_fraction=clipped_fraction(weight, scale, scheme=scheme),
                static_error=_round_trip_error(weight, scale, scheme, name),
                dynamic_error=_round_trip_error(
                    weight, compute_scale(weight, scheme, name=name), scheme, name
                ),
            )
        )
        report(canonical(name))
    if not drifts:
        raise ProfileError(
            f"the profile has {len(profile.scales)} static scales, none of them for a weight "
            "given; make it with static_scales=True, from the same model"
        )
    return tuple(drifts)


def _opened(checkpoint: str | Path | Checkpoint) -> Checkpoint:
    return checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)


def _counting(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = itertools.count(1)

    def report(name: str) -> None:
        if progress is not None:
            progress(next(done), total, name)

    return report


def _read_scale(checkpoint: Checkpoint, name: str, scheme: QuantScheme) -> Tensor | None:
    """The scale of a weight as this package shapes it; None for one that is not quantized."""
    scale_name = checkpoint.scale_name(name)
    if scale_name is None:
        return None
    scale, shape = checkpoint.tensor(scale_name).float(), checkpoint.header(name).shape
    wanted = scheme.scale_shape(shape)
    if scale.numel() != math.prod(wanted) or not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ProfileError(
            f"{scale_name} in {checkpoint.path} is no scale of {name} {list(shape)}: "
            f"{scheme.name} has {list(wanted)}, finite and positive; got {list(scale.shape)} "
            f"from {scale.min():.3g} to {scale.max():.3g}"
        )
    scale = scale.view(wanted)
    return torch.where(scale == 0, 1.0, scale)


def _round_trip_error(weight: Tensor, scale: Tensor, scheme: QuantScheme, name: str) -> float:
    quantized = torch.empty(weight.shape, dtype=scheme.dtype)
    quantize_into(weight, quantized, scale, scheme=scheme, name=name)
    error = torch.linalg.vector_norm(dequantize(quantized, scale, scheme=scheme) - weight)
    size = torch.linalg.vector_norm(weight)
    return float(error / size) if size else 0.0
