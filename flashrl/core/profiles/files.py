"""Profiles as files: the suffix tells the format, a name on the hub is fetched."""

from __future__ import annotations

from pathlib import Path

from flashrl.core.hub import find_file
from flashrl.core.profiles.profile import Profile
from flashrl.core.profiles.pt import load_profile_pt, save_profile_pt
from flashrl.errors import ProfileError

__all__ = ["SUFFIXES", "check_suffix", "load_profile", "save_profile"]

SUFFIXES = (".pt", ".safetensors")
"""flash-llm-rl's format, and ours."""


def load_profile(path: str | Path, *, scheme: str | None = None) -> Profile:
    """Read a profile, running no code that it may hold.

    Args:
        path: A ``.pt`` or ``.safetensors`` file, or ``org/name/file`` on the hub.
        scheme: What a ``profile.pt`` that is a list of names is for, default ``fp8_channel``.

    Raises:
        ProfileError: It is unsafe, damaged, or of another structure or suffix.
        ConfigError: There is no such file, here or on the hub.
        MissingDependencyError: It may be on the hub and huggingface_hub is not installed.
    """
    check_suffix(path)
    file = find_file(path)
    if file.suffix == ".pt":
        return load_profile_pt(file, scheme=scheme)
    return Profile.load(file)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile; an old file stays whole until the new one is.

    Args:
        profile: The profile.
        path: Where to, ending in one of :data:`SUFFIXES`.

    Raises:
        ProfileError: The format cannot hold the profile, or the suffix is another.
    """
    check_suffix(path)
    if Path(path).suffix == ".pt":
        save_profile_pt(profile, path)
    else:
        profile.save(path)


def check_suffix(path: str | Path) -> None:
    """Check that a path says which format is meant.

    Raises:
        ProfileError: It ends in none of :data:`SUFFIXES`.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ProfileError(
            f"{path} must end in .safetensors, the format of this package, or in .pt, that of "
            "flash-llm-rl"
        )
