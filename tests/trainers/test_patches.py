"""Changes to a framework's modules: when they are made, and how they are undone."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashrl.trainers.patches import Patches, Plugin


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported."""
    (tmp_path / "a_framework.py").write_text("def step():\n    return 'its own'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_framework"
    sys.modules.pop("a_framework", None)


@pytest.fixture
def patches(name: str) -> Iterator[Patches]:
    patches = Patches({name: change})
    yield patches
    patches.uninstall()


def change(patches: Patches, module: Any) -> None:
    """Answer otherwise."""
    patches.replace(module, "step", lambda: "changed")


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_module_is_changed_when_somebody_imports_it(patches: Patches, name: str) -> None:
    patches.install()
    assert name not in sys.modules
    assert imported(name).step() == "changed"


def test_a_module_that_is_there_is_changed_at_once(patches: Patches, name: str) -> None:
    module = imported(name)
    patches.install()
    assert module.step() == "changed"


def test_undone_is_undone_and_twice_is_once(patches: Patches, name: str) -> None:
    patches.install()
    patches.install()
    module = imported(name)
    patches.uninstall()
    patches.uninstall()
    assert module.step() == "its own"
    assert patches not in sys.meta_path
    patches.install()
    assert module.step() == "changed"


def test_after_it_is_undone_later_imports_are_left_alone(patches: Patches, name: str) -> None:
    patches.install()
    patches.uninstall()
    assert imported(name).step() == "its own"


def test_the_module_keeps_its_loader_and_its_source(patches: Patches, name: str) -> None:
    patches.install()
    module = imported(name)
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert "its own" in inspect.getsource(module)


def test_two_may_change_the_same_module(patches: Patches, name: str) -> None:
    def add(patches: Patches, module: Any) -> None:
        step = module.step
        patches.replace(module, "step", lambda: f"{step()}, and more")

    other = Patches({name: add})
    other.install()
    patches.install()
    assert imported(name).step() == "changed"
    patches.uninstall()
    assert imported(name).step() == "its own, and more"
    other.uninstall()
    assert imported(name).step() == "its own"


def test_what_is_not_as_expected_breaks_no_import(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(patches: Patches, module: Any) -> None:
        """Change what is not there."""
        patches.replace(module, "step", None)  # taken back when the next one fails
        patches.replace(module, "no_such_step", None)

    patches = Patches({name: fail})
    patches.install()
    with caplog.at_level(logging.ERROR):
        assert imported(name).step() == "its own"
    patches.uninstall()
    assert "a_framework is not as expected; not done: Change what is not there." in caplog.text


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Our logger as a process finds it that nobody has asked to speak."""
    logger = logging.getLogger("flashrl")
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", True)
    for variable in ("FLASHRL_LOGGING_LEVEL", "FLASHRL_LOGGING_FILE"):
        monkeypatch.delenv(variable, raising=False)
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(level)


def test_a_plugin_of_a_trainer_that_is_not_there_leaves_the_log_alone(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls our trainers' plugins in every process, also where nobody trains."""
    plugin = Plugin({"vllm.never": lambda *_: None, "no_such_trainer.loss": lambda *_: None})
    plugin.install()
    try:
        assert logger.propagate
        assert logger.level == logging.NOTSET
        with caplog.at_level(logging.INFO):
            logger.info("heard by whoever listens")
        assert "heard by whoever listens" in caplog.text
    finally:
        plugin.uninstall()


def test_a_plugin_of_a_trainer_that_is_there_is_heard(logger: logging.Logger) -> None:
    plugin = Plugin({"logging.never": lambda *_: None})
    plugin.install()
    try:
        assert not logger.propagate
        assert logger.level == logging.WARNING
    finally:
        plugin.uninstall()
    assert logger.propagate
