"""Adapters found by entry point, from real distributions made on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrl.core import registry
from flashrl.errors import AdapterError, MissingDependencyError, UnknownNameError

GROUP = "flashrl.test_group"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one entry point, and its module, on the path."""

    def install(distribution: str, name: str, code: str, *, version: str = "1.0") -> None:
        module = distribution.replace("-", "_") + "_plugin"
        folder = tmp_path / f"{distribution}-{version}"
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:Adapter\n")
        (folder / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, module, raising=False)

    registry._load_group.cache_clear()
    yield install
    registry._load_group.cache_clear()


WORKING = "class Adapter:\n    name = 'mine'\n"


def test_a_strangers_adapter_is_found_as_ours_are(install: Install) -> None:
    install("acme", "mine", WORKING)
    [found] = registry.list_adapters(GROUP)
    assert (found.name, found.distribution, found.error) == ("mine", "acme 1.0", "")
    assert registry.get_adapter(GROUP, "mine").name == "mine"
    assert any(entry.name == "huggingface" for entry in registry.list_adapters(registry.ENGINES))


def test_a_name_taken_twice_names_both_distributions(install: Install) -> None:
    install("acme", "mine", WORKING)
    install("umbrella", "mine", WORKING)
    with pytest.raises(AdapterError, match=r"'mine'.*umbrella 1\.0.*acme 1\.0"):
        registry.list_adapters(GROUP)


def test_one_distribution_seen_twice_counts_once(install: Install) -> None:
    install("acme", "mine", WORKING)
    install("acme", "mine", WORKING, version="1.1")
    assert [entry.name for entry in registry.list_adapters(GROUP)] == ["mine"]


def test_an_unknown_name_lists_the_known(install: Install) -> None:
    install("acme", "mine", WORKING)
    with pytest.raises(UnknownNameError, match=r"'mime'.*did you mean 'mine'.*known: mine"):
        registry.get_adapter(GROUP, "mime")


def test_an_empty_group_says_none(install: Install) -> None:
    with pytest.raises(UnknownNameError, match="known: none"):
        registry.get_adapter(GROUP, "mine")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import not_a_module\n", "ModuleNotFoundError.*not_a_module"),
        ("class Adapter:\n    def __init__(self):\n        raise OSError('no GPU')\n", "no GPU"),
        ("x = 1\n", "AttributeError.*Adapter"),
    ],
)
def test_a_broken_adapter_is_kept_with_its_reason(install: Install, code: str, reason: str) -> None:
    install("acme", "broken", code)
    install("umbrella", "mine", WORKING)
    broken, working = registry.list_adapters(GROUP)
    assert broken.adapter is None
    assert working.adapter is not None
    with pytest.raises(MissingDependencyError, match=f"'broken' of acme 1.0.*{reason}"):
        registry.get_adapter(GROUP, "broken")
