"""The log of processes that are not ours: asked for by two variables, and on our logger alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrl.core.environment import EnvironmentOptions
from flashrl.core.logs import configure_logging, follow_environment
from flashrl.errors import ConfigError

LEVEL, FILE = "FLASHRL_LOGGING_LEVEL", "FLASHRL_LOGGING_FILE"
ours = logging.getLogger("flashrl")


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    handlers, level, propagate = ours.handlers[:], ours.level, ours.propagate
    ours.handlers[:] = [h for h in handlers if isinstance(h, logging.NullHandler)]
    ours.setLevel(logging.NOTSET)
    yield
    for handler in set(ours.handlers) - set(handlers):
        handler.close()
    ours.handlers[:] = handlers
    ours.setLevel(level)
    ours.propagate = propagate


def run(code: str, **environ: str) -> str:
    """A process of its own, where pytest has no handlers on the root; what it writes to stderr."""
    found = subprocess.run(
        [sys.executable, "-c", f"import logging\nfrom flashrl.core import logs\n{code}"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stderr


LOG = "logging.getLogger('flashrl.core').debug('a detail')"
FOLLOW = f"logs.follow_environment()\n{LOG}"


@pytest.mark.parametrize("value", [None, "", " "])
def test_nothing_happens_unless_a_variable_asks(value: str | None) -> None:
    before = ours.handlers[:]
    follow_environment({} if value is None else {LEVEL: value, FILE: value})
    assert (ours.handlers, ours.level, ours.propagate) == (before, logging.NOTSET, True)


def test_a_level_is_heard_on_stderr() -> None:
    assert "DEBUG flashrl.core: a detail" in run(FOLLOW, **{LEVEL: "debug"})
    assert run(FOLLOW, **{LEVEL: "INFO"}) == ""


def test_a_file_gets_the_lines_of_every_process(tmp_path: Path) -> None:
    file = tmp_path / "flashrl.log"
    code = f"import os\nlogs.follow_environment()\n{LOG}\nprint(os.getpid())"
    wanted = {LEVEL: "DEBUG", FILE: str(file)}
    for _ in range(2):
        run(code, **wanted)
    lines = file.read_text().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == ["DEBUG flashrl.core: a detail"] * 2
    assert len({line.split()[2] for line in lines}) == 2  # the process


def test_a_second_call_adds_nothing(tmp_path: Path) -> None:
    environ = {FILE: str(tmp_path / "flashrl.log")}
    follow_environment(environ)
    handlers = ours.handlers[:]
    follow_environment({**environ, LEVEL: "DEBUG"})
    assert ours.handlers == handlers
    assert ours.level == logging.INFO
    logging.getLogger("flashrl.core").info("once")
    assert (tmp_path / "flashrl.log").read_text().count("once") == 1


def test_a_command_replaces_what_was_set_up() -> None:
    for level in ("INFO", "DEBUG"):
        configure_logging(EnvironmentOptions(logging_level=level))
    assert len([h for h in ours.handlers if not isinstance(h, logging.NullHandler)]) == 1
    assert ours.level == logging.DEBUG


def test_handlers_that_do_not_get_our_records_do_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pytest's are on the root, and our logger does not propagate to it."""
    ours.propagate = False
    follow_environment({LEVEL: "INFO"})
    logging.getLogger("flashrl.core").info("alone")
    assert capsys.readouterr().err.count("alone") == 1


def test_what_a_command_set_up_stays(tmp_path: Path) -> None:
    configure_logging(EnvironmentOptions(logging_level="ERROR"))
    handlers = ours.handlers[:]
    follow_environment({FILE: str(tmp_path / "flashrl.log")})
    assert (ours.handlers, ours.level) == (handlers, logging.ERROR)


@pytest.mark.parametrize(
    "theirs",
    [
        "logging.basicConfig(format='theirs %(message)s')",
        "logging.getLogger('flashrl').addHandler(logging.StreamHandler())",
    ],
    ids=["root", "flashrl"],
)
@pytest.mark.parametrize("first", [True, False])
def test_stderr_is_left_to_the_handlers_of_others(theirs: str, first: bool, tmp_path: Path) -> None:
    """Whichever comes first: each line is there once, and in the file as well."""
    file = tmp_path / "flashrl.log"
    steps = [theirs, "logs.follow_environment()"]
    code = "\n".join([*(steps if first else reversed(steps)), LOG])
    assert run(code, **{LEVEL: "DEBUG", FILE: str(file)}).count("a detail") == 1
    assert file.read_text().count("a detail") == 1


def test_the_root_logger_is_left_alone(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    follow_environment({LEVEL: "DEBUG", FILE: str(tmp_path / "flashrl.log")})
    logging.getLogger("stranger").warning("not ours")
    assert (root.handlers, root.level) == before
    assert "not ours" not in (tmp_path / "flashrl.log").read_text()


@pytest.mark.parametrize(("name", "value"), [(LEVEL, "LOUD"), (FILE, "/nowhere/at/all.log")])
def test_what_cannot_be_is_an_error_and_the_log_stays_as_it_was(name: str, value: str) -> None:
    before = ours.handlers[:]
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        follow_environment({name: value})
    assert ours.handlers == before
