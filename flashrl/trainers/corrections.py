"""Corrections by the names that people use for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashrl.core.correction import PRESETS, CorrectionConfig, get_config
from flashrl.errors import UnknownNameError

__all__ = ["ALIASES", "find", "names"]

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "tis": "default",
        "icepop": "nemo_rl_icepop",
        "seq_mask_tis": "nemo_rl_seq_mask_tis",
        "dppo_tv": "prime_rl_dppo_tv",
    }
)
"""An algorithm's name, and the preset that stands for it here."""


def names() -> list[str]:
    """Every name that :func:`find` takes, algorithms first."""
    return [*ALIASES, *PRESETS]


def find(name: str) -> CorrectionConfig:
    """Look a correction up by its algorithm's name, or a preset's.

    Raises:
        UnknownNameError: There is none; the message lists all.

    Example:
        >>> find("tis").high, find("icepop").bound
        (2.0, 'mask')
    """
    if name not in ALIASES and name not in PRESETS:
        raise UnknownNameError(f"unknown correction {name!r}; known: {', '.join(names())}")
    return get_config(ALIASES.get(name, name))
