"""FLASHRL_ variables on every node of Ray's cluster.

Ray's workers inherit the environment of the node's own daemon, not of the script that starts the
job; verl forwards the variables that it knows in the job's runtime environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flashrl.trainers.environment import carried_variables

__all__ = ["carried_variables", "carrying"]


def carrying(get_runtime_env: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The job's runtime environment, with our variables in it."""

    @functools.wraps(get_runtime_env)
    def with_variables(*args: Any, **kwargs: Any) -> dict[str, Any]:
        runtime_env = get_runtime_env(*args, **kwargs)
        runtime_env.setdefault("env_vars", {}).update(carried_variables())
        return runtime_env

    return with_variables
