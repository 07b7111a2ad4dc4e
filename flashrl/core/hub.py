"""Names on the Hugging Face hub, looked up only where nothing local answers to them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from flashrl.errors import ConfigError, MissingDependencyError

__all__ = ["download_file", "find_checkpoint", "find_file"]

_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<file>[\w./-]+)")
_CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")


def find_checkpoint(name: str | Path) -> Path:
    """The folder of a checkpoint.

    Args:
        name: A folder, a file in one, or ``org/name`` on the hub, of which everything but weights
            in other formats is downloaded.

    Raises:
        ConfigError: There is nothing of that name here, and it could not be had from the hub.
        MissingDependencyError: It may be on the hub and huggingface_hub is not installed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _REPO.fullmatch(str(name)):
        raise ConfigError(
            f"there is no checkpoint at {name}; give a folder that holds safetensors, or org/name "
            "on the hub"
        )
    return Path(
        _fetch("snapshot_download", str(name), "folder", allow_patterns=list(_CHECKPOINT_FILES))
    )


def find_file(name: str | Path) -> Path:
    """The path of a file.

    Args:
        name: A path, or ``org/name/file`` on the hub.

    Raises:
        ConfigError: There is no such file here, and it could not be had from the hub.
        MissingDependencyError: It may be on the hub and huggingface_hub is not installed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    hub = _FILE.fullmatch(str(name))
    if hub is None:
        raise ConfigError(f"there is no file {name}; give a path, or org/name/file on the hub")
    return Path(download_file(hub["repo"], hub["file"]))


def download_file(repo: str, file: str) -> str:
    """Fetch one file of a repository on the hub, or find it in the hub's own cache.

    Args:
        repo: ``org/name``.
        file: Its path there.

    Returns:
        Where it is on this machine.

    Raises:
        ConfigError: It could not be had.
        MissingDependencyError: huggingface_hub is not installed.
    """
    return _fetch("hf_hub_download", repo, "file", filename=file)


def _fetch(function: str, repo: str, kind: str, **options: Any) -> str:
    name = "/".join([repo, *filter(None, [options.get("filename")])])
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} is no local {kind}, and fetching it from the hub needs huggingface_hub: "
            "pip install 'flashrl[huggingface]'"
        ) from error
    try:
        return str(getattr(hub, function)(repo_id=repo, **options))
    except Exception as error:  # the hub's own errors share no root
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{name} is no local {kind}, and could not be had from the hub: {reason:.300}. "
            "Offline, download it first and give its path"
        ) from error
