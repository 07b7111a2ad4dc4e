"""Hybrid precision: which entry of FLASHRL_CONFIG a replica of the engine uses.

verl starts one engine a replica, each of which would take itself for data-parallel rank 0.  So the
process that starts replica r gets a configuration whose first entry is that of the replica's first
rank, before the engine reads it.  An engine of a reward model or a teacher gets none.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import attrs

from flashrl.core.config import Config, load_config

__all__ = ["configure", "configured", "rotate", "serves_policy"]


def rotate(config: Config, replica_rank: int, *, ranks_per_replica: int = 1) -> Config:
    """A configuration as a replica sees it, whose own ranks count from 0.

    Args:
        config: The job's.
        replica_rank: Of this replica, from 0.
        ranks_per_replica: Data-parallel ranks in each.

    Example:
        >>> config = Config.from_yaml("configs: [{fn: int8}, {fn: bf16}]")
        >>> [rotate(config, replica).for_rank(0).scheme for replica in range(3)]
        ['int8', 'bf16', 'int8']
    """
    first = replica_rank * ranks_per_replica
    entries = [config.for_rank(first + i) for i in range(len(config.entries))]
    return attrs.evolve(config, entries=entries)


def configure(
    replica_rank: int,
    *,
    ranks_per_replica: int = 1,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Let this process and its children read the configuration as the replica sees it."""
    config = load_config(environ=environ)
    if config is None or len(config.entries) == 1:
        return
    rotated = rotate(config, replica_rank, ranks_per_replica=ranks_per_replica)
    descriptor, name = tempfile.mkstemp(prefix="flashrl-", suffix=f"-replica-{replica_rank}.yaml")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(rotated.to_yaml())
    atexit.register(Path(name).unlink, missing_ok=True)
    environ["FLASHRL_CONFIG"] = name


def configured(init: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` of the process that starts a replica's engine."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_entry(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if serves_policy(_actor_name()):
            ranks = int(getattr(given["config"], "data_parallel_size", 1) or 1)
            configure(int(given["replica_rank"]), ranks_per_replica=ranks)
        else:
            os.environ.pop("FLASHRL_CONFIG", None)
        init(self, *args, **kwargs)

    return with_entry


def serves_policy(actor_name: str) -> bool:
    """Whether a server's engine generates rollouts; by the name that verl gives its actor.

    Example:
        >>> serves_policy("vllm_server_0_0"), serves_policy("vllm_server_reward_0_0")
        (True, False)
    """
    return not any(part in actor_name for part in ("server_reward_", "server_teacher_"))


def _actor_name() -> str:
    import ray

    return str(ray.get_runtime_context().get_actor_name() or "")
