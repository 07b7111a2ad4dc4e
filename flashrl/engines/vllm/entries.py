"""What FLASHRL_CONFIG and its companions say for this process."""

from __future__ import annotations

from flashrl.core.config import Entry, load_config
from flashrl.core.environment import EnvironmentOptions
from flashrl.engines.vllm import compat

__all__ = ["entry_of_rank", "lm_head_in_fp32"]


def entry_of_rank() -> Entry | None:
    """The entry of this process's data-parallel rank; None if FLASHRL_CONFIG is not set."""
    config = load_config()
    return None if config is None else config.for_rank(compat.data_parallel_rank())


def lm_head_in_fp32() -> bool:
    """Whether FLASHRL_LMHEAD_FP32, or the configuration, asks for logits in float32."""
    wanted = EnvironmentOptions.from_environ().lm_head_fp32
    if wanted is None:
        entry = entry_of_rank()
        wanted = entry is not None and entry.lm_head_fp32
    return wanted
