"""What FlashRL adds to SGLang's own functions; :mod:`compat` says where each one goes.

Functions of the kind AROUND get the original first, AFTER the result, BEFORE only the arguments.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from flashrl.core.config import load_config
from flashrl.engines.sglang import compat
from flashrl.engines.sglang.entries import entry_of_rank
from flashrl.engines.sglang.gate import WeightGate, gate_of
from flashrl.engines.sglang.storage import QuantizedParameter
from flashrl.errors import EngineStateError, FlashRLError

__all__ = [
    "ask_for_8_bit",
    "check_start",
    "follow_config",
    "guard_model",
    "handle_command",
    "load_direct",
    "note_release",
    "refuse_without_weights",
    "survive_update",
    "survive_update_from_disk",
]

logger = logging.getLogger(__name__)


def ask_for_8_bit(args: Any) -> None:
    """Name the quantization that FLASHRL_CONFIG wants, if the user named none.

    SGLang hands the arguments to every scheduler, so one that could not load this plug-in, and
    would run in 16 bit without a word, ends its start at the name that it does not know.
    """
    config = load_config()
    entries = config.entries if config is not None else ()
    if args.quantization is not None or not any(e.quant_scheme.quantized for e in entries):
        return
    args.quantization = "flashrl"
    if args.speculative_draft_model_quantization is None:
        args.speculative_draft_model_quantization = "unquant"  # else it follows the model's


def follow_config(model_config: Any, *args: Any, **kwargs: Any) -> None:
    """Make a model 8-bit that nobody asked to quantize, when FLASHRL_CONFIG says so."""
    entry = entry_of_rank()
    if entry is None or getattr(model_config, "is_draft_model", False):
        return
    if model_config.quantization is None and entry.quant_scheme.quantized:
        model_config.quantization = "flashrl"


def guard_model(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Put the gate before the ``load_weights`` of a model with 8-bit layers."""
    from flashrl.engines.sglang.quantization import FlashRLConfig

    if any(isinstance(p, QuantizedParameter) for p in model.parameters()):
        [config] = (a for a in (*args, *kwargs.values()) if isinstance(a, FlashRLConfig))
        profile = config.load_profile()
        WeightGate(model, model_type=compat.model_type_of(model), profile=profile)


def check_start(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """End the start of an engine that FLASHRL_CONFIG asked to be 8-bit and that is not."""
    gate = gate_of(runner.model)
    if gate is not None:
        gate.open()
        return
    entry = entry_of_rank()
    if entry is None or getattr(runner, "is_draft_worker", False):
        return
    if entry.quant_scheme.quantized:
        raise EngineStateError(
            f"FLASHRL_CONFIG asks for {entry.scheme}, and {type(runner.model).__name__} has no "
            f"8-bit layer: quantization is {runner.model_config.quantization!r}. Start the engine "
            "without a quantization of its own, and without SGLANG_PLUGINS or with flashrl in it"
        )


def load_direct(original: Any, model: nn.Module, named_tensors: Any) -> None:
    """Check tensors that are copied straight into parameters."""
    gate = gate_of(model)
    if gate is None:
        original(model, named_tensors)
    else:
        gate.load_direct(named_tensors)


def survive_update(original: Any, manager: Any, request: Any) -> Any:
    """Answer a failed update instead of ending the engine."""
    try:
        answer = original(manager, request)
    except Exception as error:
        answer = _failed(manager, request, error)
    return _agree(manager, request, answer)


def survive_update_from_disk(original: Any, manager: Any, request: Any) -> Any:
    """Answer a failed update from disk, and forget its path.  Half a checkpoint is a failure."""
    runner = manager.tp_worker.model_runner
    config, gate = runner.model_config, gate_of(runner.model)
    path = config.model_path
    try:
        answer = original(manager, request)
        if gate is not None and answer.success:
            gate.check_whole()
    except Exception as error:
        answer = _failed(manager, request, error)
    answer = _agree(manager, request, answer)
    if not answer.success:
        config.model_path = path
    return answer


def _failed(manager: Any, request: Any, error: Exception) -> Any:
    # What was pushed wrongly is in the message; anything else is a surprise and shows its trace.
    unexpected = None if isinstance(error, FlashRLError) else error
    logger.error("a weight update failed: %s", error, exc_info=unexpected)
    kind = compat.update_answer(request)
    if kind.waits:
        torch.distributed.barrier(group=manager.tp_cpu_group)
    return kind.make(f"{type(error).__name__}: {error}")


def _agree(manager: Any, request: Any, answer: Any) -> Any:
    """One answer for all ranks: SGLang passes on that of the first, and others may have failed."""
    group = manager.tp_cpu_group
    told: list[str | None] = [None] * torch.distributed.get_world_size(group)
    if len(told) == 1:
        return answer
    torch.distributed.all_gather_object(
        told, None if answer.success else answer.message, group=group
    )
    complaints = dict.fromkeys(message for message in told if message is not None)
    return compat.update_answer(request).make(" ".join(complaints)) if complaints else answer


def note_release(result: Any, manager: Any, request: Any) -> None:
    """Note that the weights were given up: they must be pushed before the next request."""
    if request.tags and "weights" not in request.tags:
        return
    runner = manager.tp_worker.model_runner
    gate = gate_of(runner.model)
    if gate is not None and not getattr(runner.server_args, "enable_weights_cpu_backup", False):
        gate.lose_all()


def refuse_without_weights(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Answer a request with an error while weights are missing."""
    gate = gate_of(compat.model_of(scheduler))
    debt = gate.find_debt() if gate is not None else None
    if debt is not None and getattr(request, "to_finish", None) is None:
        request.set_finish_with_abort(debt)


def handle_command(scheduler: Any, command: str, folder: str) -> None:
    """Carry out a command of an attached engine; see :mod:`worker`."""
    from flashrl.engines.sglang import worker

    worker.handle(scheduler, command, folder)
