"""A profile: smoothing factors, and scales that stay fixed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashrl.core.names import FUSED, NameIndex, canonical, fused_name
from flashrl.core.profiles.smoothing import Smoothing
from flashrl.core.schemes import get_scheme, scheme_names
from flashrl.errors import ProfileError

__all__ = ["FORMAT_VERSION", "Profile"]

FORMAT_VERSION = 1
_FORMAT = "flashrl.profile"
_FACTS = ("scheme", "groups", "weights", "norm_offset", "base_model", "quantized_model", "alpha")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
_STACK_OF = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


def _canonical_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        canonical(name): tensor.detach().to("cpu", torch.float32)
        for name, tensor in tensors.items()
    }


def _canonical_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {canonical(k): tuple(map(canonical, readers)) for k, readers in groups.items()}


def _canonical_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(canonical, names))


def _scaled(profile: Profile) -> Iterable[str]:
    return profile.scales


@attrs.frozen(kw_only=True, eq=False)
class Profile:
    """Smoothing factors and static scales of a model, by canonical parameter name.

    Args:
        scheme: Name of the scheme it is for.
        smoothing: ``s`` of each source, float32 (channels,).  A source is what puts the channels
            out: a norm's weight, or a linear weight such as ``up_proj``.
        groups: The weights that read each source's channels.
        scales: Static scales, float32, shaped as the scheme says for that weight.
        weights: Every weight to quantize, default those that have a scale.
        norm_offset: What the model's norms add to their weight: 1 in Gemma.
        base_model: The checkpoint the factors are relative to.
        quantized_model: The checkpoint they were read from, if any.
        alpha: SmoothQuant's, if they were computed.

    Raises:
        ProfileError: A factor or scale is not finite and positive, or a weight stands in two
            groups; the message lists every fault.

    Example:
        >>> profile = Profile(
        ...     scheme="int8",
        ...     smoothing={"layers.0.norm.weight": torch.tensor([2.0, 1.0])},
        ...     groups={"layers.0.norm.weight": ["layers.0.mlp.up_proj.weight"]},
        ... )
        >>> profile.smooth("layers.0.norm.weight", torch.ones(2))
        tensor([0.5000, 1.0000])
        >>> profile.smooth("layers.0.mlp.up_proj.weight", torch.ones(1, 2))
        tensor([[2., 1.]])
    """

    scheme: str
    smoothing: Mapping[str, Tensor] = attrs.field(factory=dict, converter=_canonical_keys)
    groups: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_canonical_groups)
    scales: Mapping[str, Tensor] = attrs.field(factory=dict, converter=_canonical_keys)
    weights: tuple[str, ...] = attrs.field(
        default=attrs.Factory(_scaled, takes_self=True), converter=_canonical_names
    )
    norm_offset: float = 0.0
    base_model: str = ""
    quantized_model: str = ""
    alpha: float | None = None
    _source: Mapping[str, str] = attrs.field(init=False, repr=False)
    _parts: Mapping[str, Sequence[str]] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ProfileError(f"profile for {self.scheme}: {_join(faults)}")
        source = {reader: source for source, readers in self.groups.items() for reader in readers}
        parts: dict[str, list[str]] = {}
        for name in dict.fromkeys([*source, *self.smoothing, *self.scales]):
            for whole in _wholes(name):
                parts.setdefault(whole, []).append(name)
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_parts", parts)

    def smoothing_for(self, name: str) -> Smoothing | None:
        """What smoothing does to a tensor; None when nothing.

        A fused weight or a stack of experts takes the factors that all its parts share, and a
        part those of its whole.

        Args:
            name: The tensor's name, in any spelling.

        Raises:
            ProfileError: The parts of a fused weight are smoothed differently.
        """
        name = canonical(name)
        is_bias = name.endswith(".bias")
        rows = self.smoothing.get(f"{name.removesuffix('.bias')}.weight" if is_bias else name)
        parts = self._parts.get(name, ())
        owners = [name, *_wholes(name), *parts]
        sources = {self._source[owner] for owner in owners if owner in self._source}
        if len(sources) > 1 or not self.smoothing.keys().isdisjoint(parts):
            raise ProfileError(
                f"the parts of {name} are smoothed differently; smooth {', '.join(parts)} apart"
            )
        if rows is None and not sources:
            return None
        columns = self.smoothing[sources.pop()] if sources else None
        return Smoothing(columns=columns, rows=rows, offset=0.0 if is_bias else self.norm_offset)

    def smooth(self, name: str, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Smooth one tensor by its name; one that is not smoothed passes through.

        Args:
            name: The tensor's name, in any spelling.
            tensor: As pushed.
            dtype: dtype of the result, default the tensor's own.

        Raises:
            ProfileError: As :meth:`smoothing_for`.
        """
        smoothing = self.smoothing_for(name)
        if smoothing is not None:
            return smoothing.apply(tensor, dtype=dtype)
        return tensor if dtype is None else tensor.to(dtype)

    def scale_for(self, name: str) -> Tensor | None:
        """The static scale of a weight; None when the profile has none.

        The single scale of a fused weight holds for each part (nm-vllm#336); the rows' scales of
        all parts make up those of a fused weight.

        Args:
            name: The weight's name, in any spelling.

        Raises:
            ProfileError: The scales of a fused weight and its parts cannot be told from another.
        """
        name = canonical(name)
        if name in self.scales:
            return self.scales[name]
        whole = next((self.scales[whole] for whole in _wholes(name) if whole in self.scales), None)
        parts = [part for part in self._parts.get(name, ()) if part in self.scales]
        if whole is None and not parts:
            return None
        if whole is not None and whole.numel() == 1:
            return whole
        expected = _fused_parts(name)
        scales = [self.scales[part] for part in expected if part in parts]
        if scales and len(scales) == len(expected) and all(s.ndim == 2 for s in scales):
            return torch.cat(scales)
        raise ProfileError(
            f"the profile has no static scale of {name} itself, only of its whole or some of its "
            f"parts ({', '.join(parts) or ', '.join(_wholes(name))}); load it in those pieces"
        )

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the profile fits a model.

        Args:
            shapes: Shape of each of the model's parameters, by name: a live model's, those in a
                checkpoint's headers, or those of a model built from a config on the meta device.

        Raises:
            ProfileError: A name is not the model's, or a shape does not fit; lists every fault.
        """
        index = NameIndex(shapes)
        names = dict.fromkeys([*self.smoothing, *self._source, *self.scales, *self.weights])
        faults = []
        shape_of: dict[str, tuple[int, ...]] = {}
        for name in names:
            known = next(filter(None, map(index.find, [name, *_wholes(name)])), None)
            if known is None:
                faults.append(f"{name} is not a parameter of the model")
            elif canonical(known) == name:
                shape_of[name] = tuple(shapes[known])
        for source, s in self.smoothing.items():
            for name, axis in [(source, 0), *((reader, -1) for reader in self.groups[source])]:
                if name in shape_of and shape_of[name][axis] != len(s):
                    faults.append(
                        f"smoothing of {source} has {len(s)} channels, but {name} is "
                        f"{list(shape_of[name])}"
                    )
        scheme = get_scheme(self.scheme)
        for name, scale in self.scales.items():
            shape = shape_of.get(name, ())
            if len(shape) == 2 and scheme.scale_shape(shape) != scale.shape:
                faults.append(
                    f"scale of {name} is {list(scale.shape)}, but {scheme.name} on "
                    f"{list(shape)} has {list(scheme.scale_shape(shape))}"
                )
        if faults:
            raise ProfileError(
                f"the profile (of {self.base_model or 'an unnamed model'}) does not fit the "
                f"model: {_join(faults)}"
            )

    def save(self, path: str | Path) -> None:
        """Write the profile as safetensors; an old file stays whole until the new one is.

        Args:
            path: Where to; an existing file is replaced.
        """
        path = Path(path)
        tensors = {f"smoothing:{name}": s.contiguous() for name, s in self.smoothing.items()}
        tensors |= {f"scale:{name}": s.contiguous() for name, s in self.scales.items()}
        facts = {name: getattr(self, name) for name in _FACTS}
        metadata = {"format": _FORMAT, "version": str(FORMAT_VERSION), "facts": json.dumps(facts)}
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, unfinished, metadata=metadata)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            ProfileError: It is no such file, is of a newer version, or is damaged.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ProfileError(
                f"{path} is no readable safetensors file: {error}; "
                "a profile.pt is read by flashrl.core.profiles.pt.load_profile_pt"
            ) from error
        version = metadata.get("version", "")
        if metadata.get("format") != _FORMAT or version != str(FORMAT_VERSION):
            raise ProfileError(
                f"{path} has format {metadata.get('format')!r}, version {version!r}; "
                f"{_FORMAT!r}, version {FORMAT_VERSION} is readable here"
            )
        try:
            facts = json.loads(metadata["facts"])
            kinds: dict[str, dict[str, Tensor]] = {"smoothing": {}, "scale": {}}
            for name, tensor in tensors.items():
                kind, _, parameter = name.partition(":")
                kinds[kind][parameter] = tensor
            return cls(smoothing=kinds["smoothing"], scales=kinds["scale"], **facts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"{path} is damaged: {error}") from error

    def _faults(self) -> Iterator[str]:
        if self.scheme not in scheme_names():
            yield f"unknown scheme; known: {', '.join(scheme_names())}"
        for field, tensors in (("smoothing", self.smoothing), ("scale", self.scales)):
            for name, tensor in tensors.items():
                bad = int((~torch.isfinite(tensor) | (tensor <= 0)).sum())
                if bad:
                    yield (
                        f"{bad} of {tensor.numel()} values of the {field} of {name} are NaN, "
                        "infinite, zero or negative"
                    )
        for name, tensor in self.smoothing.items():
            if tensor.ndim != 1:
                yield f"smoothing of {name} must be (channels,), got {list(tensor.shape)}"
        for name in self.smoothing.keys() ^ self.groups.keys():
            yield f"{name} has a smoothing factor or a group of readers, but not both"
        readers = [reader for names in self.groups.values() for reader in names]
        for name in sorted({name for name in readers if readers.count(name) > 1}):
            yield f"{name} stands in more than one group"


def _wholes(weight: str) -> list[str]:
    """What a weight may be a part of: a fused weight, or the stack of a layer's experts."""
    layer, dot, leaf = weight.rpartition(".")
    fused = fused_name(layer) if leaf == "weight" else None
    expert = _EXPERT.fullmatch(weight)
    stack = _STACK_OF.get(expert[2]) if expert else None
    wholes = [fused + dot + leaf] if fused else []
    return [*wholes, f"{expert[1]}.{stack}"] if expert and stack else wholes


def _fused_parts(weight: str) -> list[str]:
    """The weights of a fused one, in order; none of any other."""
    parent, _, leaf = weight.removesuffix(".weight").rpartition(".")
    return [f"{parent}.{part}.weight" for part in FUSED.get(leaf, ())]


def _join(faults: Sequence[str], shown: int = 8) -> str:
    more = [f"and {len(faults) - shown} more"] if len(faults) > shown else []
    return "; ".join([*faults[:shown], *more])
