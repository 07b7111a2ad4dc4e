"""Everything that differs between versions of SGLang, and the few places where it is patched.

Written for 0.5.12, 0.5.20 and 0.5.23.  Patches go through SGLang's own hooks; one whose target is
gone in a newer version is an error at start, not a silence.  Kernels are in :mod:`cuda`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from flashrl.core.schemes import QuantScheme
from flashrl.errors import UnsupportedError

__all__ = [
    "add_command",
    "check_engine",
    "combine_input",
    "data_parallel_rank",
    "draws_repeat",
    "generate",
    "hook",
    "is_alive",
    "largest_support",
    "model_of",
    "model_type_of",
    "note_rank",
    "rank_of",
    "register_quantizations",
    "reports_tempered",
    "shut_down",
    "tensor_parallel_rank",
    "update_answer",
    "weight_update",
]

logger = logging.getLogger(__name__)

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_RUNNER = f"{_SRT}.model_executor.model_runner"
_MANAGERS = (
    f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    f"{_SRT}.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin",  # 0.5.12
)
_DIRECT = (
    f"{_SRT}.model_executor.model_runner_components.weight_updater._model_load_weights_direct",
    f"{_RUNNER}._model_load_weights_direct",  # 0.5.12
)
_ARGUMENTS = (
    f"{_SRT}.server_args.ServerArgs.resolve_once",
    f"{_SRT}.server_args.ServerArgs.__post_init__",  # 0.5.12
)
# Where a hook can be put: the function, as versions call it, and when the hook runs.
_PLACES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "arguments": (_ARGUMENTS, "BEFORE"),
    "scheduler": ((f"{_SCHEDULER}.__init__",), "BEFORE"),
    "configuration": (
        (f"{_SRT}.configs.model_config.ModelConfig._verify_quantization",),
        "BEFORE",
    ),
    "new model": ((f"{_SRT}.model_loader.loader._initialize_model",), "AFTER"),
    "loaded model": ((f"{_RUNNER}.ModelRunner.load_model",), "AFTER"),
    "direct load": (_DIRECT, "AROUND"),
    "update from tensors": (
        tuple(f"{manager}.update_weights_from_tensor" for manager in _MANAGERS),
        "AROUND",
    ),
    "update from a group": (
        tuple(f"{manager}.update_weights_from_distributed" for manager in _MANAGERS),
        "AROUND",
    ),
    "update from disk": (
        tuple(f"{manager}.update_weights_from_disk" for manager in _MANAGERS),
        "AROUND",
    ),
    "release of memory": (
        tuple(f"{manager}.release_memory_occupation" for manager in _MANAGERS),
        "AFTER",
    ),
    "request": ((f"{_SCHEDULER}._add_request_to_queue",), "BEFORE"),
}
_noted_rank: int | None = None


def register_quantizations(configs: Mapping[str, type]) -> None:
    """Make quantizations known to SGLang, under their names."""
    registry = importlib.import_module(f"{_SRT}.layers.quantization")
    for table in ("BASE_QUANTIZATION_METHODS", "QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"):
        getattr(registry, table).update(configs)
    importlib.import_module(f"{_SRT}.server_args").add_quantization_method_choices(list(configs))


def hook(place: str, function: Callable[..., Any]) -> None:
    """Have SGLang call a function of ours.

    Args:
        place: A key of the table above.
        function: What SGLang's ``HookRegistry`` takes there.

    Raises:
        UnsupportedError: This version has no such place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    targets, when = _PLACES[place]
    target = _first_of(targets)
    HookRegistry.register(target, function, HookType[when])
    logger.info("hooked %s: %s", target, (function.__doc__ or "").split("\n")[0])


def add_command(answer: Callable[..., Any]) -> None:
    """Let every scheduler answer ``collective_rpc("flashrl", ...)``."""
    pkgutil.resolve_name(_SCHEDULER).flashrl = answer


def _first_of(paths: tuple[str, ...]) -> str:
    for path in paths:
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            continue
        return path
    raise UnsupportedError(
        f"this version of SGLang has none of {', '.join(paths)}; flashrl knows 0.5.12 to 0.5.23"
    )


def model_of(scheduler: Any) -> nn.Module:
    """The model that a scheduler runs."""
    model: nn.Module = scheduler.tp_worker.model_runner.model
    return model


def model_type_of(model: nn.Module) -> str:
    """``config.model_type``."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def tensor_parallel_rank(scheduler: Any) -> int:
    """A scheduler's rank among those that share a model."""
    return int(scheduler.tp_group.rank_in_group)


def note_rank(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Remember the data-parallel rank, which versions before 0.5.23 tell the scheduler alone."""
    global _noted_rank
    given = inspect.signature(type(scheduler).__init__).bind(scheduler, *args, **kwargs).arguments
    _noted_rank = given.get("dp_rank")


def data_parallel_rank() -> int:
    """This process's data-parallel rank; 0 without data parallelism, and in the main process."""
    rank = _noted_rank
    if rank is None:
        try:
            from sglang.srt.runtime_context import get_parallel

            rank = get_parallel().dp_rank
        except (ImportError, AttributeError, RuntimeError):  # 0.5.12, or nothing published yet
            rank = None
    return int(rank or 0)


def rank_of(layer: Any) -> tuple[int, int]:
    """The part of a layer that this rank has, and how many there are."""
    if hasattr(layer, "tp_rank") and hasattr(layer, "tp_size"):
        return int(layer.tp_rank), int(layer.tp_size)
    group = getattr(layer, "tp_group", None)
    return (0, 1) if group is None else (int(group.rank_in_group), int(group.world_size))


def combine_input(hidden_states: Tensor) -> Any:
    """What a mixture of experts hands on."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    return StandardCombineInput(hidden_states=hidden_states)


def check_engine(engine: Any, scheme: QuantScheme) -> None:
    """Refuse an engine whose weights this library cannot reach or change.

    Raises:
        UnsupportedError: Says what about the engine, and how to start it instead.
    """
    args = engine.server_args
    started = str(getattr(args, "quantization", None) or "").startswith("flashrl")
    for found, why in (
        (getattr(args, "dp_size", 1) > 1, "runs several replicas (dp_size)"),
        (getattr(args, "pp_size", 1) > 1, "is a pipeline (pp_size)"),
        (getattr(args, "speculative_algorithm", None), "drafts tokens (speculative_algorithm)"),
    ):
        if found:
            raise UnsupportedError(
                f"the engine {why}, and flashrl.attach reaches one model on tensor-parallel ranks; "
                "start one engine a replica, or set FLASHRL_CONFIG before the engine starts"
            )
    graphs = getattr(args, "device", "cpu") == "cuda" and not args.disable_cuda_graph
    if graphs and not started and scheme.quantized:
        raise UnsupportedError(
            "the engine's CUDA graphs were captured with its 16-bit layers; start it with "
            f"sgl.Engine(model, **flashrl.launch_args('sglang', {scheme.name!r})), or with "
            "disable_cuda_graph=True to attach later"
        )


def is_alive(engine: Any) -> bool:
    """Whether an engine's schedulers run; calls to one that was shut down wait for ever."""
    psutil = importlib.import_module("psutil")  # SGLang brings it
    for pid in engine.get_all_child_pids():
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
    return True


def shut_down(engine: Any) -> None:
    """End an engine's own processes; its ``shutdown`` ends every child that this process has."""
    psutil = importlib.import_module("psutil")
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()  # it ends this process when one of the engine's is gone
    watched = getattr(watchdog, "_processes", ())  # the detokenizer too
    processes = []
    for pid in {*engine.get_all_child_pids(), *(process.pid for process in watched)}:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            processes += [*process.children(recursive=True), process]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=60)


def reports_tempered() -> bool:
    """Whether reported log-probabilities are divided by the temperature before the softmax."""
    value = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "false").lower()
    return value not in ("1", "true", "yes")


def largest_support(engine: Any) -> int:
    """How many surviving tokens an engine can report; 0 where it cannot."""
    io_struct = importlib.import_module("sglang.srt.managers.io_struct")
    fields = getattr(io_struct.GenerateReqInput, "__dataclass_fields__", {})
    if "return_sampling_mask" not in fields:
        return 0
    return int(getattr(engine.server_args, "sampling_mask_max_tokens", 0))


def draws_repeat(engine: Any) -> bool:
    """Whether a request's seed has an effect."""
    return bool(getattr(engine.server_args, "enable_deterministic_inference", False))


@contextmanager
def weight_update(engine: Any) -> Iterator[None]:
    """The session that 0.5.23 wants around pushes; one that is open already is used."""
    opened = False
    if hasattr(engine, "begin_weight_update"):
        opened = bool(engine.begin_weight_update()[0])
    try:
        yield
    finally:
        if opened:
            engine.end_weight_update()


def generate(
    engine: Any, input_ids: list[list[int]], sampling_params: dict[str, Any], *, support: bool
) -> list[dict[str, Any]]:
    """Send requests past ``Engine.generate``, which does not pass ``return_sampling_mask`` on.

    Args:
        engine: SGLang's.
        input_ids: Tokens of each prompt.
        sampling_params: As SGLang takes them.
        support: Ask for log-probabilities within the support that was sampled from.
    """
    io_struct = importlib.import_module("sglang.srt.managers.io_struct")
    extra = {"return_sampling_mask": True} if support else {}
    request = io_struct.GenerateReqInput(
        input_ids=input_ids, sampling_params=sampling_params, return_logprob=True, **extra
    )
    responses = engine.tokenizer_manager.generate_request(request, None)
    answer: list[dict[str, Any]] = engine.loop.run_until_complete(responses.__anext__())
    return answer


class _Answer:
    """How a scheduler says that an update failed.

    Args:
        name: The output's class.
        waits: Whether the ranks meet at a barrier before they answer.
        extra: What else the output carries.
    """

    def __init__(self, name: str, *, waits: bool, **extra: Any) -> None:
        self._name, self.waits, self._extra = name, waits, extra

    def make(self, message: str) -> Any:
        """The answer."""
        io_struct = importlib.import_module("sglang.srt.managers.io_struct")
        return getattr(io_struct, self._name)(success=False, message=message, **self._extra)


_ANSWERS = {
    "UpdateWeightsFromTensorReqInput": _Answer("UpdateWeightsFromTensorReqOutput", waits=True),
    "UpdateWeightsFromDistributedReqInput": _Answer(
        "UpdateWeightsFromDistributedReqOutput", waits=False
    ),
    "UpdateWeightFromDiskReqInput": _Answer(
        "UpdateWeightFromDiskReqOutput", waits=False, num_paused_requests=0
    ),
}


def update_answer(request: Any) -> _Answer:
    """How a scheduler says that an update of this kind failed."""
    return _ANSWERS[type(request).__name__]
