"""What runs inside each scheduler: flush, attach, look, read, detach.

SGLang's call to all schedulers returns nothing, so answers go through files in a folder that the
caller made: ``<rank>.json``, and ``<rank>.safetensors`` for tensors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flashrl.core.profiles import Profile
from flashrl.core.schemes import QuantScheme
from flashrl.engines.sglang import compat
from flashrl.engines.sglang.conversion import Conversion
from flashrl.engines.sglang.gate import WeightGate, gate_of
from flashrl.engines.sglang.linear import FlashRLLinearMethod
from flashrl.engines.sglang.moe import FlashRLMoEMethod
from flashrl.engines.sglang.slots import Slot
from flashrl.errors import EngineStateError, FlashRLError

__all__ = ["handle"]


def handle(scheduler: Any, command: str, folder: str) -> None:
    """Carry out one command in a scheduler; never raises, since SGLang's ranks would diverge.

    Args:
        scheduler: SGLang's.
        command: A key of :data:`COMMANDS`.
        folder: Holds ``request.json``, and takes the answer.
    """
    rank = compat.tensor_parallel_rank(scheduler)
    out = Path(folder)
    try:
        request = json.loads((out / "request.json").read_text())
        with torch.no_grad():
            answer, tensors = COMMANDS[command](scheduler, request)
        if tensors:
            save_file(tensors, out / f"{rank}.safetensors")
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, FlashRLError) else "EngineStateError"
        answer = {"error": kind, "message": str(error)}
    (out / f"{rank}.json").write_text(json.dumps(answer))


Answer = tuple[dict[str, Any], dict[str, Tensor]]


def _flush(scheduler: Any, request: dict[str, Any]) -> Answer:
    """Forget cached prefixes, unless requests are running; memory stays allocated."""
    return {"idle": bool(scheduler.flush_cache(empty_cache=False))}, {}


def _attach(scheduler: Any, request: dict[str, Any]) -> Answer:
    """Make the model 8-bit, unless it is so already."""
    model: Any = compat.model_of(scheduler)
    scheme = QuantScheme(**request["scheme"])
    profile = Profile.load(request["profile"]) if request["profile"] else None
    gate = gate_of(model)
    if gate is None:
        model.flashrl_conversion = Conversion(model, scheme, profile=profile)
        return {}, {}
    held = {slot.scheme for slot in gate.slots.values()} - {None}
    if held != ({scheme} if scheme.quantized else set()):
        names = ", ".join(sorted(s.name for s in held if s)) or "bf16"
        raise EngineStateError(
            f"the engine is attached to already, with {names}; attach with that scheme, "
            "detach the other session, or start the engine without a scheme"
        )
    if not _are_equal(gate.smoother.profile, profile):
        how = "without a" if gate.smoother.profile is None else "with another"
        raise EngineStateError(
            f"the engine was made 8-bit {how} profile; attach with that one, detach the other "
            "session, or start the engine with yours"
        )
    return {}, {}


def _are_equal(one: Profile | None, other: Profile | None) -> bool:
    """Whether two profiles do the same."""
    if one is None or other is None:
        return one is other
    return (dict(one.groups), one.norm_offset) == (dict(other.groups), other.norm_offset) and all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
        for ours, theirs in ((one.smoothing, other.smoothing), (one.scales, other.scales))
    )


def _detach(scheduler: Any, request: dict[str, Any]) -> Answer:
    """Put 16-bit layers back where :func:`_attach` took them."""
    model: Any = compat.model_of(scheduler)
    conversion = getattr(model, "flashrl_conversion", None)
    if conversion is not None:
        conversion.undo()
        del model.flashrl_conversion
    return {}, {}


def _weights(scheduler: Any, request: dict[str, Any]) -> Answer:
    """Shape, dtype and place of every tensor of a full update."""
    return {name: _plain(slot) for name, slot in _gate(scheduler).slots.items()}, {}


def _plain(slot: Slot) -> dict[str, Any]:
    return {
        "shape": slot.shape,
        "dtype": str(slot.stored_dtype).removeprefix("torch."),
        "quantized": slot.scheme is not None,
        "dim": slot.dim,
        "rank": slot.rank,
        "ranks": slot.ranks,
        "aliases": slot.aliases,
        "addresses": slot.addresses,
    }


def _read(scheduler: Any, request: dict[str, Any]) -> Answer:
    """This rank's part of some tensors, dequantized."""
    slots = _gate(scheduler).slots
    return {}, {name: slots[name].read().contiguous() for name in request["names"]}


def _describe(scheduler: Any, request: dict[str, Any]) -> Answer:
    """Kernels, layers and bytes."""
    model, gate = compat.model_of(scheduler), _gate(scheduler)
    quantized = [slot for slot in gate.slots.values() if slot.scheme is not None]
    facts = {
        "model": type(model).__name__,
        "device": str(next(model.parameters()).device),
        "products": dict(Counter(_kernels(model))),
        "quantized_weights": len(quantized),
        "kept_weights": len(gate.slots) - len(quantized),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "owed": len(gate.owed),
    }
    return facts, {}


def _kernels(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, (FlashRLLinearMethod, FlashRLMoEMethod)):
            yield method.product.name


def _gate(scheduler: Any) -> WeightGate:
    gate = gate_of(compat.model_of(scheduler))
    if gate is None:
        raise EngineStateError("the engine is not 8-bit; call flashrl.attach first")
    return gate


COMMANDS: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
    "flush": _flush,
    "attach": _attach,
    "detach": _detach,
    "weights": _weights,
    "read": _read,
    "describe": _describe,
}
"""What a scheduler can be asked, by name."""
