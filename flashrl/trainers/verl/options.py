"""verl's own options for a correction, and back.

verl corrects by ``algorithm.rollout_correction``.  What these options can say exactly, they say;
the rest is named in one key of ours, ``algorithm.rollout_correction.flashrl``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flashrl.core.correction import CorrectionConfig
from flashrl.core.correction.rejection import Filter
from flashrl.core.mismatch.log_ratios import MAX_LOG_RATIO
from flashrl.trainers import corrections

__all__ = ["OWN_KEY", "SECTION", "is_on", "read_options", "write_options"]

SECTION = "algorithm.rollout_correction"
OWN_KEY = "flashrl"
"""The key in verl's section that names a correction of ours."""

# verl wants a lower bound above 0 where it drops what is outside; no ratio is smaller than this.
_LOWEST = 1e-9


def write_options(correction: str) -> dict[str, Any]:
    """Hydra keys of verl for a correction.

    Args:
        correction: A name that :func:`flashrl.trainers.corrections.find` knows.

    Returns:
        Key → value; ``+`` before a key that verl's configuration lacks.

    Raises:
        UnknownNameError: No correction has that name.

    Example:
        >>> write_options("flashrl_c8")["algorithm.rollout_correction.rollout_is_threshold"]
        8.0
    """
    config = corrections.find(correction)
    options: dict[str, Any] = {"actor_rollout_ref.rollout.calculate_log_probs": True}
    off: dict[str, Any] = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}
    if config.objective == "policy_gradient" and config.tv_delta is not None:
        return options | _within(off | {"bypass_mode": True}) | _dppo(config.tv_delta)
    if not _is_native(config):
        return options | _within(off) | {f"+{SECTION}.{OWN_KEY}": config.name}
    if config.objective == "bypass":
        return options | _within(off | {"bypass_mode": True, "loss_type": "ppo_clip"})
    if config.level == "none":
        return options | _within(off)
    threshold: float | str = config.high
    if config.bound == "mask":
        threshold = f"{config.low or _LOWEST}_{config.high}"
    return options | _within(
        off
        | {
            "rollout_is": config.level,
            "rollout_is_threshold": threshold,
            "rollout_is_batch_normalize": config.batch_normalize,
        }
    )


def _within(section: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{SECTION}.{key}": value for key, value in section.items()}


def _dppo(delta: float) -> dict[str, Any]:
    """verl's own DPPO-TV against μ; its bound on the ratio is moved out of the way."""
    actor = "actor_rollout_ref.actor"
    return {
        f"{actor}.policy_loss.loss_mode": "dppo_tv",
        f"{actor}.clip_ratio": delta,
        f"{actor}.clip_ratio_low": delta,
        f"{actor}.clip_ratio_high": delta,
        f"{actor}.clip_ratio_c": math.ceil(math.exp(MAX_LOG_RATIO)),
    }


def _is_native(config: CorrectionConfig) -> bool:
    """Whether verl's own options say exactly this."""
    plain = (
        not config.filters
        and config.veto_floor is None
        and not config.needs_advantages
        and config.adaptive_kl_scale is None
        and config.denominator == "fixed"
    )
    if config.level == "none":
        return plain
    bounded = config.bound == "mask" or (config.bound == "truncate" and config.low == 0)
    return plain and bounded and config.level in ("token", "sequence")


def is_on(section: Mapping[str, Any]) -> bool:
    """Whether verl's section corrects the loss for the rollout in any way."""
    chosen = [section.get(key) for key in ("rollout_is", "rollout_rs", "bypass_mode", OWN_KEY)]
    return any(value not in (None, False, "off") for value in chosen)


def read_options(section: Mapping[str, Any]) -> CorrectionConfig:
    """What verl's section does, in this library's words, so that it can be measured.

    Args:
        section: ``algorithm.rollout_correction``.

    Raises:
        UnknownNameError: The section names a correction of ours that there is not.

    Example:
        >>> read_options({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}).bound
        'mask'
    """
    if section.get(OWN_KEY):
        return corrections.find(section[OWN_KEY])
    filters = tuple(_read_filters(section.get("rollout_rs"), section.get("rollout_rs_threshold")))
    level = section.get("rollout_is") or "none"
    threshold = section.get("rollout_is_threshold", 2.0)
    if level == "none" or threshold is None or section.get("bypass_mode"):
        return CorrectionConfig(name="verl", level="none", filters=filters, denominator="kept")
    low, high = _bounds(threshold)
    return CorrectionConfig(
        name="verl",
        level=level,
        bound="truncate" if low is None else "mask",
        low=low or 0.0,
        high=high,
        filters=filters,
        denominator="kept" if filters else "fixed",
        batch_normalize=bool(section.get("rollout_is_batch_normalize", False)),
    )


def _bounds(threshold: float | str) -> tuple[float | None, float]:
    low, underscore, high = str(threshold).rpartition("_")
    return (float(low) if underscore else None), float(high)


def _read_filters(options: str | None, thresholds: float | str | None) -> list[Filter]:
    if not options or thresholds is None:
        return []
    names = [name.strip() for name in options.split(",") if name.strip()]
    texts = [text.strip() for text in str(thresholds).split(",") if text.strip()]
    texts = texts * len(names) if len(texts) == 1 else texts
    return [_read_filter(name, text) for name, text in zip(names, texts, strict=True)]


def _read_filter(name: str, threshold: str) -> Filter:
    scope, _, statistic = name.rpartition("_")
    over = scope.removeprefix("seq_")
    low, high = _bounds(threshold)
    if statistic != "k1":
        return Filter(statistic=statistic, over=over, high=high)
    # The bounds of verl's k1 options are on exp(k1) = 1/ρ.
    low = 1 / high if low is None else low
    return Filter(statistic="k1", over=over, low=math.log(low), high=math.log(high))
