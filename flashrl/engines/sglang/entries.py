"""What FLASHRL_CONFIG says for this process."""

from __future__ import annotations

from flashrl.core.config import Entry, load_config
from flashrl.engines.sglang import compat
from flashrl.errors import UnsupportedError

__all__ = ["check_entries", "entry_of_rank", "require_entry"]


def entry_of_rank() -> Entry | None:
    """The entry of this process's data-parallel rank; None if FLASHRL_CONFIG is not set."""
    config = load_config()
    return None if config is None else config.for_rank(compat.data_parallel_rank())


def require_entry() -> Entry:
    """The entry of this process's data-parallel rank.

    Raises:
        UnsupportedError: FLASHRL_CONFIG is not set.
    """
    entry = entry_of_rank()
    if entry is None:
        raise UnsupportedError(
            "quantization 'flashrl' needs a scheme: start the engine with "
            "flashrl.launch_args('sglang', scheme), use flashrl_int8 or another preset, "
            "or set FLASHRL_CONFIG"
        )
    return entry


def check_entries() -> None:
    """Refuse what no rank could do, before an engine starts.

    Raises:
        UnsupportedError: Names each entry and what it asks for.
    """
    config = load_config()
    faults = [
        f"configs[{index}]: {key} is not supported; {instead}"
        for index, entry in enumerate(config.entries if config else ())
        for key, asked, instead in (
            ("kv_cache", entry.kv_cache, "an fp8 KV cache needs calibrated scales"),
            ("lm_head_fp32", entry.lm_head_fp32, "start SGLang with --enable-fp32-lm-head"),
            ("prune_dead_neurons", entry.quant_scheme.prune_dead_neurons, "use int8"),
        )
        if asked
    ]
    if faults:
        raise UnsupportedError("\n  ".join(faults))
