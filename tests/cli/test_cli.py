"""The frame: lazy commands, streams, exit codes, colours, the log."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest

import flashrl as package
from flashrl import cli
from flashrl.errors import ConfigError, FlashRLError, VerificationError

FRAMEWORKS = {"torch", "transformers", "vllm", "sglang", "ray", "verl", "openrlhf", "trl"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["doctor", "--json"],
        ["doctor", "--help"],
        ["predict", "--model", "qwen2.5-7b", "--gpu", "h200"],
        ["profile", "--help"],
        ["config", "show", "int8"],
        ["cleanup"],
    ],
    ids=" ".join,
)
def test_no_framework_is_loaded_that_is_not_needed(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from flashrl.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as exit: assert not exit.code, exit.code\n"
        f"print(sorted({FRAMEWORKS!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.strip().splitlines()[-1] == "[]"
    assert found.stdout


def test_help_imports_no_command() -> None:
    code = (
        "import sys\n"
        "from flashrl.cli import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in COMMANDS if f'flashrl.cli.{name}' in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().splitlines()[-1] == "[]"


def test_the_installed_script_is_this_group() -> None:
    entries = metadata.distribution("flashrl").entry_points
    [script] = entries.select(group="console_scripts")
    assert script.load() is cli.main


def test_module_runs_as_the_script_does() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "flashrl.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"flashrl, version {package.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_json_and_help(name: str) -> None:
    command = importlib.import_module(f"flashrl.cli.{name}").command
    assert isinstance(command, click.Command)
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    assert command.help


def test_unknown_commands_are_answered_with_a_suggestion(flashrl: Callable[..., Any]) -> None:
    result = flashrl("predcit")
    assert result.exit_code == 2
    assert "Did you mean 'predict'?" in result.stderr
    assert "doctor" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["--no-such-option"], ["doctor", "--no-such-option"], ["predict"]]
)
def test_bad_usage_is_exit_code_2_on_stderr(
    arguments: list[str], flashrl: Callable[..., Any]
) -> None:
    result = flashrl(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Adds a command ``fail`` that raises what it is given."""

    def add(error: BaseException) -> None:
        @click.command("fail")
        def command() -> None:
            print("half a result")  # noqa: T201
            raise error

        module = types.ModuleType("flashrl.cli.fail")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashrl.cli.fail", module)
        monkeypatch.setitem(cli.COMMANDS, "fail", "Fail.")

    return add


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("file.yaml:\n  configs[0].fn: unknown [bold]scheme[/bold]"), 2),
        (FlashRLError("x" * 500), 2),
        (VerificationError("model.layers.0 differs"), 1),
    ],
)
def test_our_errors_are_a_message_and_an_exit_code(
    error: FlashRLError,
    exit_code: int,
    failing: Callable[..., None],
    flashrl: Callable[..., Any],
) -> None:
    failing(error)
    result = flashrl("fail")
    assert result.exit_code == exit_code
    assert result.stderr == f"error: {error}\n"
    assert result.stdout == "half a result\n"


def test_debug_shows_the_traceback(
    failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(ConfigError("broken"))
    monkeypatch.setenv("FLASHRL_DEBUG", "1")
    with pytest.raises(ConfigError, match="broken"):
        cli.main(["fail"])
    monkeypatch.setenv("FLASHRL_DEBUG", "0")
    with pytest.raises(SystemExit):
        cli.main(["fail"])


def test_errors_that_are_not_ours_are_not_hidden(failing: Callable[..., None]) -> None:
    failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_errors_are_red_unless_no_color_says_otherwise(
    variables: dict[str, str],
    coloured: bool,
    failing: Callable[..., None],
    flashrl: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(ConfigError("broken"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[1;31m" in flashrl("fail").stderr) == coloured


def test_the_log_goes_to_stderr_and_the_file_and_never_through_the_root(
    flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "flashrl.log"
    monkeypatch.setenv("FLASHRL_LOGGING_LEVEL", "debug")
    monkeypatch.setenv("FLASHRL_LOGGING_FILE", str(file))

    @click.command("fail")
    def command() -> None:
        logging.getLogger("flashrl.core").debug("a detail")
        logging.getLogger("stranger").warning("not ours")

    module = types.ModuleType("flashrl.cli.fail")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashrl.cli.fail", module)
    monkeypatch.setitem(cli.COMMANDS, "fail", "Log.")
    root_handlers, root_level = logging.getLogger().handlers[:], logging.getLogger().level

    for _ in range(2):  # a second run replaces the handlers of the first
        result = flashrl("fail")
        assert result.exit_code == 0
        assert result.stdout == ""
        assert result.stderr.count("DEBUG flashrl.core: a detail") == 1
    content = file.read_text()
    assert content.count("a detail") == 2
    assert "not ours" not in content
    assert (logging.getLogger().handlers, logging.getLogger().level) == (root_handlers, root_level)


@pytest.mark.parametrize(
    ("name", "value"),
    [("FLASHRL_LOGGING_LEVEL", "LOUD"), ("FLASHRL_LOGGING_FILE", "/nowhere/at/all.log")],
)
def test_a_log_that_cannot_be_is_a_clear_error(
    name: str, value: str, flashrl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    result = flashrl("doctor")
    assert result.exit_code == 2
    assert name in result.stderr
    assert value in result.stderr
    assert flashrl("--help").exit_code == 0
