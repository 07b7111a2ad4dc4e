"""What a tensor goes through on its way into vLLM's model, whichever way it comes.

Every way in ends at the model's ``load_weights``; an :class:`Intake` stands in its place.  It
smooths as the profile says, zeroes the norms' dead channels, joins values and scales that a sender
quantized, and puts each tensor where it goes.  What it does not know it leaves to the model's own
``load_weights``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, ItemsView, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from flashrl.core.interfaces import NamedTensors
from flashrl.core.profiles import Profile
from flashrl.core.profiles.smoothing import Smoothing
from flashrl.core.quantize import kernels
from flashrl.core.schemes import QuantScheme
from flashrl.core.updates.halves import Halves, is_half, weight_of
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.checkpoint_names import Contents
from flashrl.engines.vllm.kv_cache import CacheScales
from flashrl.engines.vllm.loading import Faults, is_finite, watching
from flashrl.engines.vllm.placement import Piece, find_pieces, storages_of
from flashrl.engines.vllm.plan import Batch, Plan, load_pieces
from flashrl.engines.vllm.pruning import Pruner
from flashrl.errors import (
    FlashRLError,
    NonFiniteError,
    SchemeError,
    UnsupportedError,
    WeightUpdateError,
)

__all__ = ["Intake", "intake_of", "static_scale"]


def intake_of(model: nn.Module) -> Intake | None:
    """The intake of a model, if it has one."""
    return getattr(model, "flashrl_intake", None)


@attrs.define
class _Push:
    """One call of ``load_weights``."""

    faults: Faults
    plan: Plan | None = None
    batch: Batch | None = None
    smooths: bool = True
    loaded: set[str] = attrs.field(factory=set)


class Intake:
    """Stands in the place of a model's ``load_weights``.

    Args:
        model: vLLM's model; its ``load_weights`` is replaced.
        scheme: How its linears are stored.
        contents: What its checkpoint holds; asked when the first tensor comes.
        profile: Smoothing factors and static scales.
        loaded: Whether the model holds its weights already.
        keep: Remember kept tensors as they were pushed, for a way back to 16 bit.
        cache: Scales of an FP8 KV cache, which follow what is loaded.

    Attributes:
        pushed: Kept tensors that smoothing or pruning changed, as they were pushed.
        pruner: Zeroes the norms' dead channels, where the scheme asks for it.
    """

    def __init__(
        self,
        model: Any,
        scheme: QuantScheme,
        *,
        contents: Callable[[], Contents],
        profile: Profile | None = None,
        loaded: bool = False,
        keep: bool = False,
        cache: CacheScales | None = None,
    ) -> None:
        self.profile = profile
        self.cache = cache
        self.pushed: dict[str, Tensor] = {}
        self._model = model
        self._scheme = scheme
        self._contents = functools.cache(contents)
        self._native = functools.partial(type(model).load_weights, model)
        self._loaded, self._begun, self._keep = loaded, False, keep
        self._plan: Plan | None = None
        self.pruner: Pruner | None = None
        self._halves = Halves()
        self._smoothing: dict[str, Smoothing | None] = {}
        model.load_weights = self.load_weights
        model.flashrl_intake = self

    def remove(self) -> None:
        """Give the model its own ``load_weights`` back."""
        del self._model.load_weights, self._model.flashrl_intake
        if self.cache is not None:
            self.cache.remove()

    @property
    def plan(self) -> Plan:
        """Where each tensor goes; found out when first asked for.

        Raises:
            EngineStateError: A reload of vLLM's own is under way, and it is too late to ask.
        """
        if self._plan is None:
            compat.settle_reload(self._model)
            pieces = find_pieces(
                self._model, self._contents().shapes, storages_of(self._model).values()
            )
            self._plan = Plan(pieces, dict(self._model.named_parameters()))
        return self._plan

    def begin(self) -> None:
        """Make sure that profile and model fit; called by itself when the first tensor comes.

        Raises:
            ProfileError: They do not.
            SchemeError: The scheme has static scales, and the profile lacks one.
        """
        if self._begun:
            return
        shapes = self._contents().shapes
        if self.profile is not None:
            self.profile.check(shapes)
        if self._scheme.prune_dead_neurons:
            self.pruner = Pruner(self._scheme, shapes, self.profile)
        if self._scheme.quantized and not self._scheme.dynamic:
            self._set_static_scales()
        self._begun = True

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """What every way into vLLM calls.

        Args:
            weights: Checkpoint names and tensors.  Those of a list are taken together; of an
                iterator, each may be overwritten as soon as the next is asked for.

        Returns:
            Names of the engine's parameters that were loaded.

        Raises:
            NonFiniteError: A tensor holds NaN or infinity; on a GPU after all were loaded.
            ShapeError: A tensor does not fit.
        """
        with torch.no_grad(), watching(collect=False) as faults:
            return self._load(weights, faults)

    def update(self, weights: NamedTensors) -> dict[str, str]:
        """Load weights past those that are refused.

        Returns:
            Why each refused tensor was refused.  Those are as they were, but for one that holds
            NaN or infinity on a GPU: the kernel that finds that out writes as it reads.
        """
        stream = weights if isinstance(weights, (list, tuple)) else iter(weights)
        with torch.no_grad(), watching(collect=True) as faults:
            try:
                self._load(stream, faults)
            except Exception as error:
                # vLLM's own complaint.  The rest is read, since the sender may be gathering shards
                # together with other ranks.
                faults.by_name[faults.current] = f"vLLM refused it: {type(error).__name__}: {error}"
                for name, _ in stream:
                    faults.by_name.setdefault(
                        name, "not loaded, because vLLM refused a tensor of the same push"
                    )
        return faults.by_name

    def smoothing_of(self, name: str) -> Smoothing | None:
        """What the profile does to a tensor, its factors where the model is."""
        if self.profile is None:
            return None
        if name not in self._smoothing:
            found = self.profile.smoothing_for(name)
            self._smoothing[name] = found and _move(found, next(self._model.parameters()).device)
        return self._smoothing[name]

    def _load(self, weights: NamedTensors, faults: Faults) -> set[str]:
        push = _Push(faults)
        # vLLM's own load of the checkpoint comes first, before layers have their final form.
        if self._loaded and not compat.is_reloading(self._model):
            push.plan = self.plan
            push.batch = self._make_batch(weights)
        rest = self._remaining(weights, push)
        first = next(rest, None)
        if first is not None:
            push.loaded.update(self._native(itertools.chain([first], rest)) or ())
        if push.batch is not None:
            push.batch.run()
            for name in push.batch.find_faults():
                faults.lost(name)
        if self.cache is not None and push.plan is not None:
            self.cache.refresh(push.loaded)
        self._loaded = True
        return push.loaded

    def _remaining(self, weights: NamedTensors, push: _Push) -> Iterator[tuple[str, Tensor]]:
        """Load what is known; yield what vLLM must load, ready."""
        for name, tensor in weights:
            push.faults.current = name
            self.begin()
            # A checkpoint in 8 bit was smoothed before it was quantized, its norms too.
            push.smooths = self._loaded or not self._contents().quantized
            try:
                ready = self._take(name, tensor, push)
            except FlashRLError as error:
                push.faults.note(error)
                continue
            if ready is not None:
                yield name, ready
        for name, norm in self.pruner.norms().items() if self.pruner else ():
            pieces = push.plan.find(name, norm) if push.plan else None
            if pieces is None:
                yield name, norm
            else:
                self._put(name, norm, pieces, push)

    def _take(self, name: str, tensor: Tensor, push: _Push) -> Tensor | None:
        """Put a tensor in place, or return it ready for vLLM."""
        if is_half(name, tensor):
            self._take_half(name, tensor, push)
            return None
        self._halves.forget(name)
        smoothing = self.smoothing_of(name) if push.smooths else None
        pieces = push.plan.find(name, tensor) if push.plan else None
        kept = pieces is not None and pieces[0].storage is None
        if kept and self._keep and (smoothing is not None or self.pruner is not None):
            self.pushed[name] = tensor.clone()
        fused = pieces is not None and not kept and self.pruner is None
        if smoothing is not None and (smoothing.rows is not None or not fused):
            tensor, smoothing = smoothing.apply(tensor, dtype=torch.float32), None
        if kept and not is_finite(tensor, push.faults.flag(tensor.device)):
            raise NonFiniteError(f"{name} holds NaN or infinity; nothing was written")
        if self.pruner is not None and self.pruner.take(name, tensor):
            return None
        if pieces is None:
            return tensor
        columns = None if smoothing is None else smoothing.columns
        self._put(name, tensor, pieces, push, columns)
        return None

    def _put(
        self,
        name: str,
        tensor: Tensor,
        pieces: Sequence[Piece],
        push: _Push,
        columns: Tensor | None = None,
    ) -> None:
        push.loaded.update(piece.owner for piece in pieces)
        if columns is None and push.batch is not None and push.batch.add(name, pieces, tensor):
            return
        flag = None
        if pieces[0].storage is not None:
            flag = push.faults.flag(pieces[0].home.device)
        load_pieces(pieces, tensor, smoothing=columns, flag=flag, name=name)

    def _take_half(self, name: str, tensor: Tensor, push: _Push) -> None:
        weight = weight_of(name)
        pieces = self.plan.find_quantized(weight)
        if pieces is None:
            raise WeightUpdateError(
                f"{name} is quantized, and the engine has no weight {weight} in 8 bit; push it in "
                "16 bit"
            )
        if push.smooths and self.smoothing_of(weight) is not None:
            raise UnsupportedError(
                f"{name} was quantized by the sender, and the engine's profile smooths it first; "
                "push it in 16 bit, or start the engine without the profile"
            )
        if push.smooths and not self._scheme.dynamic:
            raise UnsupportedError(
                f"{name} was quantized by the sender, and the engine keeps static scales; push it "
                "in 16 bit"
            )
        try:
            both = self._halves.take(
                name,
                tensor,
                weight=weight,
                shape=pieces[0].shape,
                scheme=self._scheme,
                flag=push.faults.flag(tensor.device),
            )
        except FlashRLError as error:
            raise type(error)(f"{name} {error}") from error
        if both is None:
            return
        values, scale = both
        for piece in pieces:
            piece.take(values, scale)
        push.loaded.update(piece.owner for piece in pieces)
        if self.pruner is not None:
            self.pruner.take_values(weight, values)

    def _make_batch(self, weights: NamedTensors) -> Batch | None:
        """A batch, where all tensors of a push are there at once and a kernel takes them."""
        if not isinstance(weights, (list, tuple, ItemsView)):
            return None
        device = next(self._model.parameters()).device
        if not kernels.available(device, self._scheme):
            return None
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        return Batch(self._scheme, flag)

    def _set_static_scales(self) -> None:
        for name, pieces in self.plan.pieces.items():
            if pieces[0].storage is None:
                continue
            scale = static_scale(self.profile, self._scheme, name)
            for piece in pieces:
                assert piece.storage is not None  # as the first is
                rows = slice(piece.row, piece.row + piece.size[0])
                piece.storage.scale_of(rows).copy_(piece.cut_scale(scale, self._scheme))


def static_scale(profile: Profile | None, scheme: QuantScheme, name: str) -> Tensor:
    """The scale that a profile keeps for a weight.

    Raises:
        SchemeError: It has none.
    """
    scale = profile.scale_for(name) if profile is not None else None
    if scale is None:
        raise SchemeError(
            f"scheme {scheme.name!r} has static scales, and the profile has none for {name}; pass "
            "a profile that has, or a dynamic scheme"
        )
    return scale


def _move(smoothing: Smoothing, device: torch.device) -> Smoothing:
    return attrs.evolve(
        smoothing,
        columns=None if smoothing.columns is None else smoothing.columns.to(device),
        rows=None if smoothing.rows is None else smoothing.rows.to(device),
    )
