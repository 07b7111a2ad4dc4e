"""Engine arguments that start vLLM in 8 bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from flashrl.core.config import Config, load_config
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.errors import ConfigError, UnsupportedError

__all__ = ["configure", "launch_arguments", "refuse_unsupported", "scheme_to_dict"]

_LOGPROBS_MODE = "processed_logprobs"
# What an argument holds that nobody gave.
_UNSET: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "logprobs_mode": (None, "raw_logprobs"),
    "hf_overrides": (None, {}),
    "distributed_executor_backend": (None,),
    "load_format": ("auto",),
}


def launch_arguments(scheme: QuantScheme) -> dict[str, Any]:
    """What ``vllm.LLM`` takes to run a scheme.

    Args:
        scheme: How linears are stored; one that is no preset travels in ``hf_overrides``.
    """
    arguments: dict[str, Any] = {"logprobs_mode": _LOGPROBS_MODE}
    if scheme == PRESETS.get(scheme.name) and scheme.quantized:
        arguments["quantization"] = f"flashrl_{scheme.name}"
    elif scheme.quantized:
        arguments["quantization"] = "flashrl"
        arguments["hf_overrides"] = {"quantization_config": scheme_to_dict(scheme)}
    return arguments


def scheme_to_dict(scheme: QuantScheme) -> dict[str, Any]:
    """A scheme as a checkpoint's ``quantization_config``, plain values only."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in attrs.asdict(scheme).items()}
    return {"quant_method": "flashrl", "scheme": fields}


def refuse_unsupported(scheme: QuantScheme) -> None:
    """Refuse what this engine does not do, rather than leave it out silently.

    Raises:
        UnsupportedError: Names it.
    """
    asked = {
        "static scales (dynamic: false)": not scheme.dynamic,
        f"a {scheme.kv_cache} KV cache, whose scales it would not recompute": scheme.kv_cache,
        "pruning of dead neurons": scheme.prune_dead_neurons,
    }
    for what, wanted in asked.items():
        if wanted:
            raise UnsupportedError(
                f"scheme {scheme.name!r} asks for {what}, which the vLLM engine does not do; "
                "leave it out"
            )


def configure(args: Any) -> None:
    """Set what FLASHRL_CONFIG wants and the user left alone.

    Args:
        args: vLLM's ``EngineArgs``, changed in place.

    Raises:
        ConfigError: The user set an argument to something else; all such are named.
        UnsupportedError: The configuration has a profile.
    """
    config = load_config()
    if config is None:
        return
    wanted = _wanted(args, config)
    faults = [
        f"{name}={getattr(args, name)!r} was given, and FLASHRL_CONFIG needs {value!r}"
        for name, value in wanted.items()
        if name != "model" and getattr(args, name) not in (value, *_UNSET[name])
    ]
    if faults:
        raise ConfigError(
            f"FLASHRL_CONFIG={os.environ.get('FLASHRL_CONFIG')} and the engine's arguments "
            f"contradict each other: {'; '.join(faults)}. Drop the argument or the variable"
        )
    for name, value in wanted.items():
        setattr(args, name, value)


def _wanted(args: Any, config: Config) -> dict[str, Any]:
    """The arguments of an engine, or of several that start from one set of arguments."""
    rank = args.data_parallel_rank
    several = rank is None and args.data_parallel_size > 1 and len(config.entries) > 1
    entry = config.for_rank(rank or 0)
    for each in config.entries:
        refuse_unsupported(each.quant_scheme)
    for profile in {e.profile for e in config.entries} - {None}:
        raise UnsupportedError(
            f"profile {profile}: the vLLM engine computes its scales from the weights and takes no "
            "profile; leave it out of the configuration"
        )
    if several:
        # Each rank looks its own entry up.
        wanted: dict[str, Any] = {"quantization": "flashrl", "logprobs_mode": _LOGPROBS_MODE}
    else:
        wanted = launch_arguments(entry.quant_scheme)
    given = {
        "model": entry.model,
        "distributed_executor_backend": entry.distributed_executor_backend,
        "load_format": entry.load_format,
    }
    return {**wanted, **{name: value for name, value in given.items() if value is not None}}
