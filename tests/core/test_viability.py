"""What is looked up of a distribution, as pip's own metadata has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrl.core.viability import Viability


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, version: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )

    return write


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("1.16", True),
        ("1.16.0", True),
        ("1.16rc1", True),
        ("1.16.dev0+g1234", True),
        ("1.100", True),
        ("2", True),
        ("1.15.9", False),
        ("1.2", False),
        ("1", False),
        ("0.99rc1", False),
    ],
)
def test_versions_compare_as_numbers(install, version: str, ok: bool) -> None:  # type: ignore[no-untyped-def]
    install("trainer", version)
    found = Viability.of_distribution("trainer", oldest="1.16", flaw="has no hooks")
    assert found.ok is ok
    assert found.versions == {"trainer": version}
    expected = "" if ok else f"trainer {version} has no hooks; 1.16 or newer is needed"
    assert found.reason == expected


def test_what_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    found = Viability.of_distribution("no-such-engine", extra="engine")
    assert found.reason == "no-such-engine is not installed; pip install 'flashrl[engine]'"
    assert (found.ok, dict(found.versions)) == (False, {})
