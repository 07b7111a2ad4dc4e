"""vLLM calls :func:`register` in every process before it looks at a model."""

from __future__ import annotations

import functools

from flashrl.core.config import Entry, load_config
from flashrl.core.schemes import QuantScheme
from flashrl.errors import ConfigError

__all__ = ["entry_of_rank", "register", "scheme_of_rank"]


@functools.cache
def register() -> None:
    """Make FlashRL's quantizations known; with FLASHRL_CONFIG set, use them.  Idempotent."""
    from flashrl.engines.vllm import compat, quantization

    quantization.register()
    compat.add_worker_method()
    if load_config() is not None:
        compat.inject_engine_args()


def entry_of_rank() -> Entry | None:
    """What FLASHRL_CONFIG says for this process's data-parallel rank; None if it is not set."""
    from flashrl.engines.vllm import compat

    config = load_config()
    return None if config is None else config.for_rank(compat.data_parallel_rank())


def scheme_of_rank() -> QuantScheme:
    """The scheme of this process's data-parallel rank.

    Raises:
        ConfigError: FLASHRL_CONFIG is not set here, though the engine was started with it.
    """
    entry = entry_of_rank()
    if entry is None:
        raise ConfigError(
            "the engine was started with quantization='flashrl', whose scheme stands in "
            "FLASHRL_CONFIG, and that is not set in this process"
        )
    return entry.quant_scheme
