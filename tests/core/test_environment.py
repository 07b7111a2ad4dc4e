"""The environment variables beside FLASHRL_CONFIG."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrl.core.environment import EnvironmentOptions
from flashrl.errors import ConfigError


def test_nothing_set_gives_the_defaults() -> None:
    options = EnvironmentOptions.from_environ({})
    assert options == EnvironmentOptions(
        lm_head_fp32=None,
        logging_level="INFO",
        logging_file=None,
        quantized_sync=False,
        test_reload=(),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("ON", True),
        ("0", False),
        ("no", False),
        ("", None),
        (" ", None),
    ],
)
def test_flags(text: str, value: bool | None) -> None:
    assert EnvironmentOptions.from_environ({"FLASHRL_LMHEAD_FP32": text}).lm_head_fp32 is value


def test_the_rest_is_read() -> None:
    options = EnvironmentOptions.from_environ(
        {
            "FLASHRL_LOGGING_LEVEL": "debug",
            "FLASHRL_LOGGING_FILE": "~/flashrl.log",
            "FLASHRL_QUANTIZED_SYNC": "yes",
            "FLASHRL_TEST_RELOAD": "org/a, org/b,",
        }
    )
    assert options.logging_level == "DEBUG"
    assert options.logging_file == Path.home() / "flashrl.log"
    assert options.quantized_sync
    assert options.test_reload == ("org/a", "org/b")


def test_every_fault_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        EnvironmentOptions.from_environ(
            {"FLASHRL_LMHEAD_FP32": "fp32", "FLASHRL_LOGGING_LEVEL": "LOUD"}
        )
    message = str(caught.value)
    assert "FLASHRL_LMHEAD_FP32 is 'fp32'; allowed: 1, TRUE" in message
    assert "FLASHRL_LOGGING_LEVEL is 'LOUD'; allowed: DEBUG, INFO, WARNING" in message


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRL_LOGGING_LEVEL", "ERROR")
    assert EnvironmentOptions.from_environ().logging_level == "ERROR"
