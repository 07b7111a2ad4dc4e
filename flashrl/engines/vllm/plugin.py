"""vLLM calls :func:`register` in every process before it looks at a model."""

from __future__ import annotations

import functools
from typing import Any

from flashrl.core.config import EnvironmentOptions, load_config
from flashrl.core.logs import follow_environment

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Make FlashRL's quantizations known; with FLASHRL_CONFIG set, use them.  Idempotent."""
    follow_environment()
    from flashrl.engines.vllm import compat, quantization

    quantization.register()
    compat.add_worker_method(_answer)
    if load_config() is not None:
        compat.inject_engine_args()
        compat.follow_weights_on_cpu()
        if EnvironmentOptions.from_environ().test_reload:
            compat.after_start(_check_reload)


def _answer(worker: Any, operation: str, *args: Any) -> Any:
    from flashrl.engines.vllm.worker import call

    return call(worker, operation, *args)


def _check_reload(engine: Any) -> None:
    from flashrl.engines.vllm.reload_check import check_reload

    config = load_config()
    models = EnvironmentOptions.from_environ().test_reload
    if config is not None and models:
        parallel = engine.vllm_config.parallel_config
        rank = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        check_reload(engine, config.for_rank(int(rank)), models)
