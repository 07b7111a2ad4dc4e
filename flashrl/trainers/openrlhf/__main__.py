"""``python -m flashrl.trainers.openrlhf``: OpenRLHF's trainer, its arguments, and all of FlashRL.

The same as ``python -m openrlhf.cli.train_ppo_ray``, after a word to Ray: every process of the job,
on every node, gets our variables and adds guards, metrics and corrections to itself.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flashrl.errors import ConfigError
from flashrl.trainers import corrections
from flashrl.trainers.environment import carried_variables
from flashrl.trainers.openrlhf.options import OWN_KEY, OWN_VARIABLE
from flashrl.trainers.openrlhf.plugin import install

__all__ = ["carrying", "main", "take_correction"]

_SCRIPT = "openrlhf.cli.train_ppo_ray"
_HOOK = "flashrl.trainers.openrlhf.plugin.install"


def main() -> None:
    """Run OpenRLHF's own script, with its own arguments."""
    correction, arguments = take_correction(sys.argv[1:])
    if correction is not None:
        os.environ[OWN_VARIABLE] = correction
    import ray

    install()
    ray.init = carrying(ray.init)
    sys.argv[1:] = arguments
    runpy.run_module(_SCRIPT, run_name="__main__", alter_sys=True)


def take_correction(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``--flashrl.correction NAME`` out of the arguments.

    Args:
        arguments: As they were given.

    Returns:
        The name, or None; and the rest.

    Raises:
        ConfigError: The name is missing.
        UnknownNameError: No correction has that name.

    Example:
        >>> take_correction(["--seed", "1", "--flashrl.correction=bypass"])
        ('bypass', ['--seed', '1'])
    """
    rest = list(arguments)
    name = None
    for index, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key != f"--{OWN_KEY}":
            continue
        end = index + 1 if equals else index + 2
        name = value if equals else (*arguments[index + 1 : end], "")[0]
        if not name or name.startswith("--"):
            known = ", ".join(corrections.names())
            raise ConfigError(f"--{OWN_KEY} needs the name of a correction: {known}")
        del rest[index:end]
        break
    return (name if name is None else corrections.find(name).name), rest


def carrying(init: Callable[..., Any]) -> Callable[..., Any]:
    """``ray.init``, whose job carries our variables and our hook to each of its processes."""

    @functools.wraps(init)
    def with_runtime_env(*args: Any, **kwargs: Any) -> Any:
        runtime_env = dict(kwargs.get("runtime_env") or {})
        runtime_env["env_vars"] = {**(runtime_env.get("env_vars") or {}), **carried_variables()}
        runtime_env["worker_process_setup_hook"] = _HOOK
        return init(*args, **{**kwargs, "runtime_env": runtime_env})

    return with_runtime_env


if __name__ == "__main__":
    main()
