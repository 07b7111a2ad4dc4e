"""The environment variables beside ``FLASHRL_CONFIG``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from flashrl.errors import ConfigError

__all__ = ["EnvironmentOptions"]

_ON, _OFF = ("1", "TRUE", "YES", "ON"), ("0", "FALSE", "NO", "OFF")
_FLAGS = dict.fromkeys(_ON, True) | dict.fromkeys(_OFF, False)
_LEVELS = {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
_LEVELS["WARN"] = "WARNING"


@attrs.frozen(kw_only=True)
class EnvironmentOptions:
    """What the other ``FLASHRL_`` variables say.

    Args:
        lm_head_fp32: ``FLASHRL_LMHEAD_FP32``; None when it is not set.
        logging_level: ``FLASHRL_LOGGING_LEVEL``, for our logger alone.
        logging_file: ``FLASHRL_LOGGING_FILE``, which gets the log too.
        quantized_sync: ``FLASHRL_QUANTIZED_SYNC``: a trainer sends weights to its engine in 8 bit.
        test_reload: ``FLASHRL_TEST_RELOAD``, models to load one after the other.
    """

    lm_head_fp32: bool | None = None
    logging_level: str = "INFO"
    logging_file: Path | None = None
    quantized_sync: bool = False
    test_reload: tuple[str, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> EnvironmentOptions:
        """Read them; one that is empty counts as not set.

        Raises:
            ConfigError: Values are not allowed; all of them are named.

        Example:
            >>> EnvironmentOptions.from_environ({"FLASHRL_LMHEAD_FP32": "1"}).lm_head_fp32
            True
        """
        faults: list[str] = []

        def choose(name: str, choices: Mapping[str, Any], default: Any) -> Any:
            value = environ.get(name, "").strip()
            if value and value.upper() not in choices:
                faults.append(f"{name} is {value!r}; allowed: {', '.join(choices)}")
            return choices.get(value.upper(), default)

        file = environ.get("FLASHRL_LOGGING_FILE", "").strip()
        models = environ.get("FLASHRL_TEST_RELOAD", "").split(",")
        options = cls(
            lm_head_fp32=choose("FLASHRL_LMHEAD_FP32", _FLAGS, None),
            logging_level=choose("FLASHRL_LOGGING_LEVEL", _LEVELS, cls().logging_level),
            logging_file=Path(file).expanduser() if file else None,
            quantized_sync=choose("FLASHRL_QUANTIZED_SYNC", _FLAGS, False),
            test_reload=tuple(model.strip() for model in models if model.strip()),
        )
        if faults:
            raise ConfigError("environment: " + "; ".join(faults))
        return options
