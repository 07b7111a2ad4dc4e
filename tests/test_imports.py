"""What an import costs: nothing, until something is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flashrl

HEAVY = ("torch", "transformers", "vllm", "sglang", "ray", "verl", "trl", "openrlhf")


def loaded_by(code: str) -> set[str]:
    probe = f"{code}\nimport sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split("\n")[-2].split())


def test_importing_flashrl_loads_no_framework() -> None:
    assert loaded_by("import flashrl, flashrl.errors") == set()


def test_looking_adapters_up_loads_no_framework() -> None:
    code = (
        "from flashrl.core import registry\n"
        "found = [e for g in (registry.ENGINES, registry.TRAINERS) "
        "for e in registry.list_adapters(g)]\n"
        "assert found\n"
        "for e in found: assert e.adapter is not None, e.error; e.adapter.check()"
    )
    assert loaded_by(code) == set()


def test_owning_an_engine_is_asked_without_importing_one() -> None:
    code = (
        "from flashrl.core import registry\n"
        "for e in registry.list_adapters(registry.ENGINES): assert not e.adapter.owns(object())"
    )
    assert loaded_by(code) == set()


def test_public_names_are_listed_and_load_lazily() -> None:
    assert {"attach", "launch_args", "Session"} <= set(dir(flashrl))
    assert flashrl.Session.__module__ == "flashrl.session"
    assert flashrl.core.__name__ == "flashrl.core"
    with pytest.raises(AttributeError, match="atach"):
        flashrl.atach  # noqa: B018
