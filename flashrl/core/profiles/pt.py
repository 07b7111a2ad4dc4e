"""The ``profile.pt`` of flash-llm-rl 1.0.3, read safely and written as it reads it.

What the file holds (``flash_rl/flash_quantization.py``, ``profiling_int8`` and ``profiling_fp8``;
``torch.save`` of plain containers):

- int8: a dict from parameter name to ``{"input_scale", "output_scale", "type"}``.  A pushed tensor
  becomes ``round(w · output_scale · input_scale)``, clamped to [-128, 127], where ``type`` is
  ``torch.int8``, and is cast to ``type`` otherwise.

  ========================  ======================  ======================
  parameter                 input_scale             output_scale
  ========================  ======================  ======================
  ``*layernorm*.weight``    1 / s, (channels,)      1.0
  q, k, v, gate             s of the norm, (1, in)  1 / scale, (out, 1)
  up                        s of the norm, (1, in)  1 / (scale · s'), (out, 1)
  o                         1.0                     1 / scale, (out, 1)
  down                      s', (1, in)             1 / scale, (out, 1)
  ========================  ======================  ======================

  s' smooths ``up_proj`` into ``down_proj``.  It is fitted by least squares, so it is close to 1 and
  never quite 1 where a checkpoint was not smoothed there.
- fp8: a list of the names of the quantized weights, whose scales are always dynamic.

Here ``s`` divides what puts a channel out and multiplies what reads it, as everywhere in this
package.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from flashrl.core.names import canonical
from flashrl.core.profiles.profile import Profile
from flashrl.core.profiles.smoothing import find_groups
from flashrl.core.schemes import get_scheme
from flashrl.errors import ProfileError

__all__ = ["load_profile_pt", "save_profile_pt"]

_KEYS = {"input_scale", "output_scale", "type"}


def load_profile_pt(path: str | Path, *, scheme: str | None = None) -> Profile:
    """Read a ``profile.pt``, running no code that it may hold.

    Args:
        path: The file.
        scheme: What a list of names is for, default ``fp8_channel``; an int8 profile is for int8.

    Raises:
        ProfileError: It is unsafe, damaged or of another structure, or holds NaN as the original's
            profiles do where a norm's weight is zero.
    """
    try:
        with warnings.catch_warnings():
            # Of pickle protocols that torch.save does not write: it loads or is refused below.
            warnings.simplefilter("ignore", UserWarning)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ProfileError(
            f"{path} is damaged, or holds more than tensors and plain containers, so that loading "
            "it could run code; it was not loaded. Make a new profile from the checkpoints "
            f"instead. ({error})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ProfileError(f"{path} is no readable profile.pt: {error}") from error
    if isinstance(content, Mapping):
        return _from_entries(path, content)
    if isinstance(content, (list, tuple)) and all(isinstance(name, str) for name in content):
        weights = [name for name in content if name.endswith(".weight")]
        return Profile(scheme=scheme or "fp8_channel", weights=weights)
    raise ProfileError(
        f"{path} holds a {type(content).__name__}; a dict of scales (int8) or a list of "
        "parameter names (fp8) is expected"
    )


def save_profile_pt(profile: Profile, path: str | Path) -> None:
    """Write a profile so that flash-llm-rl reads it.

    Args:
        profile: For int8, with a static scale per row of every weight; or for fp8.
        path: Where to; an existing file is replaced once the new one is whole.

    Raises:
        ProfileError: The format cannot hold the profile.
    """
    path = Path(path)
    scheme = get_scheme(profile.scheme)
    if scheme.type == "float" and profile.smoothing:
        raise ProfileError(
            "an fp8 profile.pt holds names only, and would lose the smoothing factors; "
            "save the profile as safetensors"
        )
    content = list(profile.weights) if scheme.type == "float" else _to_entries(profile)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@attrs.frozen(kw_only=True, eq=False)
class _Entry:
    """One entry of an int8 profile; a factor of 1.0 is None."""

    input_scale: Tensor | None
    output_scale: Tensor | None
    quantized: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape; -1 where the entry does not tell."""
        if self.input_scale is not None and self.input_scale.ndim == 1:
            return (len(self.input_scale),)
        rows = -1 if self.output_scale is None else self.output_scale.shape[0]
        return (rows, -1 if self.input_scale is None else self.input_scale.shape[-1])


def _from_entries(path: str | Path, content: Mapping[Any, Any]) -> Profile:
    entries = {canonical(str(name)): _parse(path, name, entry) for name, entry in content.items()}
    smoothing: dict[str, Tensor] = {}
    groups = find_groups({name: entry.shape for name, entry in entries.items()})
    for source, readers in groups.items():
        is_norm = len(entries[source].shape) == 1
        factor = entries[source if is_norm else readers[0]].input_scale
        if factor is not None and not bool((factor == 1).all()):
            smoothing[source] = (1.0 / factor if is_norm else factor).flatten()
    groups = {source: groups[source] for source in smoothing}
    source_of = {reader: source for source, readers in groups.items() for reader in readers}
    scales = {}
    for name, entry in entries.items():
        own = smoothing.get(name)
        _check_input(path, name, entry, smoothing.get(source_of.get(name, "")), own)
        if entry.quantized and entry.output_scale is not None:
            scale = 1.0 / entry.output_scale
            scales[name] = scale if own is None else scale / own.view(-1, 1)
    return Profile(scheme="int8", smoothing=smoothing, groups=groups, scales=scales)


def _parse(path: str | Path, name: Any, entry: Any) -> _Entry:
    if not (isinstance(name, str) and isinstance(entry, Mapping) and entry.keys() == _KEYS):
        raise ProfileError(
            f"{path}: entry {name!r} must be a dict of {', '.join(sorted(_KEYS))}, got "
            f"{sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__}"
        )
    factors = []
    for key in ("input_scale", "output_scale"):
        value = entry[key]
        if not isinstance(value, (Tensor, int, float)):
            raise ProfileError(f"{path}: {key} of {name} is a {type(value).__name__}, no factor")
        factor = torch.as_tensor(value).detach().float()
        bad = int((~torch.isfinite(factor) | (factor <= 0)).sum())
        if bad:
            raise ProfileError(
                f"{path}: {bad} of {factor.numel()} values of {key} of {name} are NaN, infinite, "
                "zero or negative. The original writes such values where a norm's weight or a "
                "whole row is zero; make the profile anew with profile_from_checkpoints"
            )
        factors.append(None if factor.ndim == 0 and factor == 1 else factor)
    return _Entry(
        input_scale=factors[0], output_scale=factors[1], quantized=entry["type"] == torch.int8
    )


def _check_input(
    path: str | Path, name: str, entry: _Entry, source: Tensor | None, own: Tensor | None
) -> None:
    """Check that the input scale is what the smoothing of its source says."""
    given = torch.ones(1) if entry.input_scale is None else entry.input_scale.flatten()
    expected = torch.ones(1) if source is None else source
    if len(entry.shape) == 1 and own is not None:
        expected = 1.0 / own
    if expected.shape not in (given.shape, (1,)) or not torch.allclose(given, expected, rtol=1e-4):
        raise ProfileError(
            f"{path}: the input_scale of {name} is not that of the norm or weight it reads from, "
            "so the model would compute something else"
        )


def _to_entries(profile: Profile) -> dict[str, dict[str, Any]]:
    unscaled = [name for name in profile.weights if name not in profile.scales]
    linear = [name for name in profile.smoothing if name in profile.weights]
    faults = {
        f"its scheme is {profile.scheme}, not int8 with a scale per row": (
            profile.scheme != "int8" or any(s.ndim != 2 for s in profile.scales.values())
        ),
        f"{len(unscaled)} weights have no static scale": bool(unscaled),
        "it smooths weights other than up_proj": any(".up_proj." not in x for x in linear),
        "its norms add an offset to their weight": profile.norm_offset != 0.0,
    }
    if any(faults.values()):
        raise ProfileError(
            "an int8 profile.pt cannot hold this profile: "
            + "; ".join(fault for fault, found in faults.items() if found)
            + ". Save it as safetensors, or calibrate an int8 checkpoint with static scales"
        )
    source_of = {reader: source for source, names in profile.groups.items() for reader in names}
    entries = {}
    for name in dict.fromkeys([*profile.smoothing, *source_of, *profile.scales]):
        scale, own = profile.scales.get(name), profile.smoothing.get(name)
        factor = profile.smoothing[source_of[name]].view(1, -1) if name in source_of else None
        if scale is None and own is not None:
            factor = 1.0 / own
        if scale is not None and own is not None:
            scale = scale * own.view(-1, 1)
        entries[name] = {
            "input_scale": 1.0 if factor is None else factor,
            "output_scale": 1.0 if scale is None else 1.0 / scale,
            "type": torch.bfloat16 if scale is None else torch.int8,
        }
    return entries
