"""TRL's own options for a correction, and back."""

from __future__ import annotations

import math
from typing import Any

from flashrl.core.correction import CorrectionConfig
from flashrl.errors import UnsupportedError
from flashrl.trainers import corrections

__all__ = ["read_options", "write_options"]

_PREFIX = "vllm_importance_sampling"


def write_options(correction: str) -> dict[str, Any]:
    """Fields of TRL's ``GRPOConfig`` for a correction.

    Args:
        correction: A name that :func:`flashrl.trainers.corrections.find` knows.

    Returns:
        Field → value.  A bound that is not there is left out: it is TRL's default.

    Raises:
        UnknownNameError: No correction has that name.
        UnsupportedError: No field says it; the message names the trainer that does.

    Example:
        >>> write_options("icepop")["vllm_importance_sampling_mode"]
        'token_mask'
    """
    config = corrections.find(correction)
    options: dict[str, Any] = {"use_vllm": True}
    if config == CorrectionConfig(name=config.name, level="none"):
        return options | {f"{_PREFIX}_correction": False}
    said = CorrectionConfig(
        name=config.name,
        level=config.level,
        bound=config.bound,
        low=config.low,
        high=config.high,
    )
    if config != said or config.level not in ("token", "sequence") or config.bound == "none":
        raise UnsupportedError(
            f"TRL has no option for correction {config.name!r}; use "
            "flashrl.trainers.trl.corrected.CorrectedGRPOTrainer in place of GRPOTrainer, with "
            f"correction={config.name!r} and vllm_importance_sampling_correction=False"
        )
    options |= {
        f"{_PREFIX}_correction": True,
        f"{_PREFIX}_mode": f"{config.level}_{config.bound}",
    }
    if config.low > 0:
        options[f"{_PREFIX}_clip_min"] = config.low
    if config.high < math.inf:
        options[f"{_PREFIX}_clip_max"] = config.high
    return options


def read_options(args: Any) -> CorrectionConfig:
    """What a ``GRPOConfig`` does, in this library's words, so that it can be measured.

    Args:
        args: TRL's ``GRPOConfig``.

    Returns:
        The correction.
    """
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return CorrectionConfig(name="trl", level="none")
    level, _, bound = args.vllm_importance_sampling_mode.partition("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    return CorrectionConfig(
        name="trl",
        level=level,
        bound=bound,
        low=0.0 if low is None else low,
        high=math.inf if high is None else high,
    )
