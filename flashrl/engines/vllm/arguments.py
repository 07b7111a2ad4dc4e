"""Engine arguments that start vLLM in 8 bit."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from flashrl.core.config import Config, load_config
from flashrl.core.schemes import PRESETS, QuantScheme
from flashrl.errors import ConfigError, SchemeError, UnsupportedError

if TYPE_CHECKING:
    from flashrl.core.profiles import Profile

__all__ = [
    "check_scheme",
    "configure",
    "fingerprint",
    "launch_arguments",
    "scheme_to_dict",
    "write_profile",
]

_LOGPROBS_MODE = "processed_logprobs"
# What an argument holds that nobody gave.
_UNSET: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "logprobs_mode": (None, "raw_logprobs"),
    "distributed_executor_backend": (None,),
    "load_format": ("auto",),
    "kv_cache_dtype": (None, "auto"),
}


def launch_arguments(scheme: QuantScheme, *, profile: str | None = None) -> dict[str, Any]:
    """What ``vllm.LLM`` takes to run a scheme.

    Args:
        scheme: How linears are stored; one that is no preset travels in ``hf_overrides``.
        profile: Path of a profile, which every worker must find; travels there too.
    """
    arguments: dict[str, Any] = {"logprobs_mode": _LOGPROBS_MODE}
    if not scheme.quantized:
        return arguments
    if scheme.kv_cache:
        arguments["kv_cache_dtype"] = scheme.kv_cache
    if scheme == PRESETS.get(scheme.name) and profile is None:
        arguments["quantization"] = f"flashrl_{scheme.name}"
    else:
        arguments["quantization"] = "flashrl"
        config = scheme_to_dict(scheme) | ({"profile": profile} if profile else {})
        arguments["hf_overrides"] = {"quantization_config": config}
    return arguments


def scheme_to_dict(scheme: QuantScheme) -> dict[str, Any]:
    """A scheme as a checkpoint's ``quantization_config``, plain values only."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in attrs.asdict(scheme).items()}
    return {"quant_method": "flashrl", "scheme": fields}


def write_profile(profile: Profile) -> str:
    """Write a profile where this machine's workers find it, until this process ends."""
    folder = tempfile.mkdtemp(prefix="flashrl-profile-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "profile.safetensors"
    profile.save(path)
    return str(path)


def fingerprint(profile: Profile | None) -> str | None:
    """Tells profiles apart by what they do; None for none."""
    if profile is None:
        return None
    digest = hashlib.sha256(repr((dict(profile.groups), profile.norm_offset)).encode())
    for tensors in (profile.smoothing, profile.scales):
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_scheme(scheme: QuantScheme, *, profile: object = None) -> None:
    """Refuse what this engine does not do, rather than leave it out silently.

    Args:
        scheme: How linears are to be stored.
        profile: A profile or its path, if there is one.

    Raises:
        UnsupportedError: Names what it does not do.
        SchemeError: Static scales are wanted, and there is no profile that has them.
    """
    if scheme.kv_cache and not scheme.quantized:
        raise UnsupportedError(
            f"scheme {scheme.name!r} asks for a {scheme.kv_cache} KV cache and quantizes no "
            "weights, and its scales follow weights that come through an 8-bit scheme; leave it out"
        )
    if scheme.quantized and not scheme.dynamic and profile is None:
        raise SchemeError(
            f"scheme {scheme.name!r} has static scales (dynamic: false), which come from a "
            "profile; pass one, or a dynamic scheme"
        )


def configure(args: Any) -> None:
    """Set what FLASHRL_CONFIG wants and the user left alone.

    Args:
        args: vLLM's ``EngineArgs``, changed in place.

    Raises:
        ConfigError: The user set an argument to something else; all such are named.
        UnsupportedError: The configuration asks for what this engine does not do.
    """
    config = load_config()
    if config is None:
        return
    wanted = _wanted(args, config)
    override = wanted.pop("hf_overrides", None)
    faults = [
        f"{name}={getattr(args, name)!r} was given, and FLASHRL_CONFIG needs {value!r}"
        for name, value in wanted.items()
        if name != "model" and getattr(args, name) not in (value, *_UNSET[name])
    ]
    given = args.hf_overrides or {}
    if override is not None and (
        callable(given) or given.get("quantization_config") not in (None, *override.values())
    ):
        faults.append(f"hf_overrides={given!r} was given, and FLASHRL_CONFIG needs {override!r}")
    if faults:
        raise ConfigError(
            f"FLASHRL_CONFIG={os.environ.get('FLASHRL_CONFIG')} and the engine's arguments "
            f"contradict each other: {'; '.join(faults)}. Drop the argument or the variable"
        )
    if override is not None:
        wanted["hf_overrides"] = {**given, **override}
    for name, value in wanted.items():
        setattr(args, name, value)


def _wanted(args: Any, config: Config) -> dict[str, Any]:
    """The arguments of an engine, or of several that start from one set of arguments."""
    rank = args.data_parallel_rank
    if rank is None and "VLLM_DP_RANK" in os.environ:  # a trainer starts each rank by itself
        rank = int(os.environ["VLLM_DP_RANK"])
    several = rank is None and args.data_parallel_size > 1 and len(config.entries) > 1
    entry = config.for_rank(rank or 0)
    for each in config.entries:
        check_scheme(each.quant_scheme, profile=each.profile)
    if several:
        # Each rank looks its own entry up; what they start from is one model.
        wanted: dict[str, Any] = {"quantization": "flashrl", "logprobs_mode": _LOGPROBS_MODE}
        caches = {each.quant_scheme.kv_cache for each in config.entries}
        if len(caches) > 1:
            raise ConfigError(
                "some entries of FLASHRL_CONFIG ask for an fp8 KV cache and others do not, and one "
                "call of vLLM starts all data-parallel ranks with one; start each rank by itself "
                "with data_parallel_rank"
            )
        if caches != {None}:
            wanted["kv_cache_dtype"] = caches.pop()
        models = {each.model for each in config.entries}
        if len(models) > 1:
            raise ConfigError(
                f"the entries of FLASHRL_CONFIG start from several models ({models}), and one "
                "call of vLLM starts all data-parallel ranks from one; leave 'model' out, or start "
                "each rank by itself with data_parallel_rank"
            )
    else:
        wanted = launch_arguments(entry.quant_scheme, profile=entry.profile)
    given = {
        "model": entry.model,
        "distributed_executor_backend": entry.distributed_executor_backend,
        "load_format": entry.load_format,
    }
    return {**wanted, **{name: value for name, value in given.items() if value is not None}}
