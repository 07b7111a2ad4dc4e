"""FLASHRL_ variables on every node of Ray's cluster.

Ray's workers inherit the environment of the node's own daemon, not of the script that starts the
job; verl forwards the variables that it knows in the job's runtime environment.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["carried_variables", "carrying"]

_PREFIX = "FLASHRL_"


def carried_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The FLASHRL_ variables that are set; a file by its absolute path.

    Example:
        >>> carried_variables({"FLASHRL_CONFIG": "int8", "HOME": "/"})
        {'FLASHRL_CONFIG': 'int8'}
    """
    found = {k: v for k, v in environ.items() if k.startswith(_PREFIX) and v.strip()}
    config = Path(found.get("FLASHRL_CONFIG", "")).expanduser()
    if config.is_file():
        found["FLASHRL_CONFIG"] = str(config.absolute())
    return found


def carrying(get_runtime_env: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The job's runtime environment, with our variables in it."""

    @functools.wraps(get_runtime_env)
    def with_variables(*args: Any, **kwargs: Any) -> dict[str, Any]:
        runtime_env = get_runtime_env(*args, **kwargs)
        runtime_env.setdefault("env_vars", {}).update(carried_variables())
        return runtime_env

    return with_variables
