"""Local first, then the hub, and offline a clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrl.core.hub import find_checkpoint, find_file
from flashrl.errors import ConfigError, MissingDependencyError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a hub cache, and a hub that cannot be reached."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def fill(cache: Path, file: str) -> Path:
    """Put a file of org/repo where the hub's own library would have."""
    repo, commit = cache / "models--org--repo", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    folder = repo / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / file).write_text("content")
    return folder


def test_what_is_here_wins(tmp_path: Path, cache: Path) -> None:
    fill(cache, "profile.pt")
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / "org" / "repo" / "profile.pt").touch()
    assert find_checkpoint("org/repo") == Path("org/repo")
    assert find_file("org/repo/profile.pt") == Path("org/repo/profile.pt")


def test_what_was_downloaded_is_found_offline(cache: Path) -> None:
    folder = fill(cache, "profile.pt")
    assert find_checkpoint("org/repo") == folder
    assert find_file("org/repo/profile.pt") == folder / "profile.pt"


@pytest.mark.parametrize("find", [find_checkpoint, find_file])
def test_offline_is_a_clear_error(find) -> None:
    name = "org/repo" if find is find_checkpoint else "org/repo/profile.pt"
    with pytest.raises(ConfigError, match=f"{name} is no local .* Offline, download it first"):
        find(name)


@pytest.mark.parametrize("name", ["./org/repo", "../a/b.pt", "/a/b/c.pt", "a", "~/x/y", "a/b/"])
def test_what_cannot_be_on_the_hub_is_not_looked_for_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="there is no checkpoint at"):
        find_checkpoint(name)
    with pytest.raises(ConfigError, match="there is no file"):
        find_file(name)


def test_without_the_hubs_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flashrl\[huggingface\]'"):
        find_checkpoint("org/repo")


def test_nothing_of_the_hub_is_imported_until_it_is_needed() -> None:
    code = (
        "import sys\nfrom flashrl.core.hub import find_file\nfind_file('.')\n"
        "print(sorted({'torch', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
