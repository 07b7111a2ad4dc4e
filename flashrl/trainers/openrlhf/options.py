"""OpenRLHF's own options for a correction, and back.

What ``--algo.advantage.is_correction_*`` can say exactly, it says.  The rest is named by an option
of ours, ``--flashrl.correction``, which ``python -m flashrl.trainers.openrlhf`` takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from flashrl.core.config import load_config
from flashrl.core.correction import CorrectionConfig
from flashrl.core.correction.rejection import Filter
from flashrl.core.mismatch.log_ratios import MAX_LOG_RATIO
from flashrl.core.schemes import QuantScheme
from flashrl.errors import UnsupportedError
from flashrl.trainers import corrections

__all__ = [
    "OWN_KEY",
    "OWN_VARIABLE",
    "SECTION",
    "own_correction",
    "read_options",
    "schemes",
    "write_options",
]

SECTION = "algo.advantage.is_correction"
OWN_KEY = "flashrl.correction"
"""The option that names a correction of ours."""

OWN_VARIABLE = "FLASHRL_CORRECTION"
"""The same for the processes that OpenRLHF starts; our launcher sets it."""

# Above every ratio: a clamped one is at most this.
_UNBOUNDED = float(math.ceil(math.exp(MAX_LOG_RATIO)))


def write_options(correction: str) -> dict[str, Any]:
    """Command-line options of OpenRLHF for a correction.

    Args:
        correction: A name that :func:`flashrl.trainers.corrections.find` knows.

    Returns:
        Option without dashes → value.

    Raises:
        UnknownNameError: No correction has that name.
        UnsupportedError: It depends on a whole batch, and OpenRLHF's loss sees parts of it.

    Example:
        >>> options = write_options("tis")
        >>> options["algo.advantage.is_correction_mode"]
        'clip'
        >>> options["algo.advantage.is_correction_threshold"]
        [0.0, 2.0]
    """
    config = corrections.find(correction)
    if _is_off(config):
        return {f"{SECTION}_level": "off"}
    native = _native(config)
    if native is not None:
        return native
    if config.adaptive_kl_scale is not None or config.batch_normalize:
        raise UnsupportedError(
            f"correction {config.name!r} weighs a token by its whole batch, and OpenRLHF's loss "
            "sees a micro-batch at a time; choose another, such as tis or icepop"
        )
    if config.denominator != "fixed":
        raise UnsupportedError(
            f"correction {config.name!r} divides by the tokens that it keeps, and OpenRLHF counts "
            "all tokens of a batch beforehand; choose denominator 'fixed'"
        )
    # OpenRLHF asks the engine for log-probabilities only if its own correction is on.
    return _options("token", "mask", 0.0, _UNBOUNDED) | {OWN_KEY: config.name}


def _options(level: str, mode: str, low: float, high: float) -> dict[str, Any]:
    return {
        f"{SECTION}_level": level,
        f"{SECTION}_mode": mode,
        f"{SECTION}_gating": "ratio",
        f"{SECTION}_threshold": [low, high],
    }


def _is_off(config: CorrectionConfig) -> bool:
    return config == CorrectionConfig(name=config.name, level="none")


def _native(config: CorrectionConfig) -> dict[str, Any] | None:
    """OpenRLHF's own options if they say exactly this."""
    if config == CorrectionConfig(name=config.name, low=config.low, high=config.high):
        return _options("token", "clip", config.low, config.high)
    if config == CorrectionConfig(name=config.name, bound="mask", low=config.low, high=config.high):
        return _options("token", "mask", config.low, config.high)
    if len(config.filters) == 1:
        (kept,) = config.filters
        if (kept.statistic, kept.over) == ("ratio", "mean") and config == _geometric_mask(
            config.name, kept
        ):
            return _options("seq", "mask", kept.low, kept.high)
    return None


def _geometric_mask(name: str, kept: Filter) -> CorrectionConfig:
    """What ``seq`` is there: it drops sequences, and survivors keep each token's own ratio."""
    return CorrectionConfig(name=name, bound="none", filters=(kept,))


def own_correction(environ: Mapping[str, str] = os.environ) -> CorrectionConfig | None:
    """The correction of ours that takes the place of OpenRLHF's, or None.

    Raises:
        UnknownNameError: No correction has that name.
    """
    name = environ.get(OWN_VARIABLE, "").strip()
    return corrections.find(name) if name else None


def read_options(args: Any, *, environ: Mapping[str, str] = os.environ) -> CorrectionConfig:
    """What OpenRLHF's arguments do, in this library's words, so that it can be measured.

    Args:
        args: OpenRLHF's arguments, nested as it nests them.
        environ: Where the name of a correction of ours stands.

    Returns:
        The correction.  A divergence that gates it (``binary_kl``, ``tv``) is left out: what it
        drops is OpenRLHF's own ``is_filter_ratio``.
    """
    own = own_correction(environ)
    if own is not None:
        return own
    section, name = args.algo.advantage, "openrlhf"
    level = section.is_correction_level
    if level == "off" or args.actor.policy_loss_type != "ppo":
        return CorrectionConfig(name=name, level="none")
    if section.is_correction_gating != "ratio":
        return CorrectionConfig(name=name, bound="none")
    low, high = section.is_correction_threshold
    if level == "seq":
        return _geometric_mask(name, Filter(statistic="ratio", over="mean", low=low, high=high))
    bound = "truncate" if section.is_correction_mode == "clip" else "mask"
    return CorrectionConfig(name=name, bound=bound, low=low, high=high)


def schemes() -> list[QuantScheme]:
    """What the engines generate with: the first entry of FLASHRL_CONFIG, for each has rank 0."""
    config = load_config()
    return [] if config is None else [config.for_rank(0).quant_scheme]
