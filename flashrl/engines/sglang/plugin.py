"""SGLang calls :func:`register` in the main process and in every scheduler, before it starts."""

from __future__ import annotations

import logging
import os
import sys

from flashrl.core.config import Entry, load_config
from flashrl.errors import UnsupportedError

__all__ = ["entry_of_rank", "register", "require_entry"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Make FlashRL's quantizations known; with FLASHRL_CONFIG set, use them.  Idempotent.

    SGLang logs what a plugin raises and goes on without it.  When FLASHRL_CONFIG asks for 8 bit,
    going on in 16 bit would be silent, so the process ends instead.

    Raises:
        SystemExit: FLASHRL_CONFIG is set and cannot be followed.
    """
    try:
        from flashrl.engines.sglang import compat

        compat.register()
        if "FLASHRL_CONFIG" in os.environ:
            _check_entries()
    except Exception as error:
        if not os.environ.get("FLASHRL_CONFIG"):
            raise
        logger.exception("flashrl could not be set up in SGLang")
        sys.exit(
            f"FLASHRL_CONFIG={os.environ['FLASHRL_CONFIG']!r} cannot be followed in SGLang: {error}"
        )


def entry_of_rank() -> Entry | None:
    """What FLASHRL_CONFIG says for this process's data-parallel rank, or None."""
    config = load_config()
    if config is None:
        return None
    from flashrl.engines.sglang import compat

    return config.for_rank(compat.data_parallel_rank())


def require_entry() -> Entry:
    """What FLASHRL_CONFIG says for this process's data-parallel rank.

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


def _check_entries() -> None:
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
