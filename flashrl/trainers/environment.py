"""Our environment variables, ``FLASHRL_*``, for the processes of a job.

Ray's workers inherit the environment of the node's own daemon, not of the script that starts the
job, so whoever starts one carries them in the job's runtime environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["carried_variables"]

_PREFIX = "FLASHRL_"


def carried_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of our variables that are set; a file by its absolute path.

    Example:
        >>> carried_variables({"FLASHRL_CONFIG": "int8", "HOME": "/"})
        {'FLASHRL_CONFIG': 'int8'}
    """
    found = {k: v for k, v in environ.items() if k.startswith(_PREFIX) and v.strip()}
    config = Path(found.get("FLASHRL_CONFIG", "")).expanduser()
    if config.is_file():
        found["FLASHRL_CONFIG"] = str(config.absolute())
    return found
