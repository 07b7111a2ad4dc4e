"""Importance weights: presets, configuration, and how they are computed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch

from flashrl.core.correction.rejection import (
    Filter,
    within_off_policy_limit,
    within_total_variation,
    without_vetoed,
)
from flashrl.core.mismatch import MismatchState, measure_block
from flashrl.core.mismatch.log_ratios import (
    RowBlock,
    bounded_exp,
    check_advantages,
    check_tensors,
    iter_blocks,
    raise_invalid,
)
from flashrl.errors import ConfigError, UnknownNameError

__all__ = ["PRESETS", "Correction", "CorrectionConfig", "compute", "get_config"]

_LOGGER = logging.getLogger(__name__)

_CHOICES = {
    "objective": ("decoupled", "bypass", "policy_gradient"),
    "level": ("token", "sequence", "geometric", "none"),
    "bound": ("truncate", "mask", "none"),
    "denominator": ("fixed", "kept"),
    "on_invalid": ("raise", "mask"),
}


def _as_filters(value: Iterable[Filter | Mapping[str, Any]]) -> tuple[Filter, ...]:
    return tuple(item if isinstance(item, Filter) else Filter(**item) for item in value)


@attrs.frozen(kw_only=True)
class CorrectionConfig:
    """How ratios become weights, and what is dropped.

    Args:
        name: The name the configuration answers to.
        objective: What the loss is.  ``"decoupled"``: PPO against π_old, times the weight.
            ``"bypass"``: PPO against μ, whose ratio already is the correction, so ``level`` must be
            ``"none"``.  ``"policy_gradient"``: w A ∇log π, with the current policy in the weight.
        level: ρ of a ``"token"``, of a ``"sequence"`` (product), its ``"geometric"`` mean, or
            ``"none"``: every weight 1.
        bound: ``"truncate"`` clamps ρ into [low, high] (TIS), ``"mask"`` drops what is outside
            (IcePop at token level, masked importance sampling at sequence level), ``"none"`` leaves
            ρ as it is.
        low: Lower bound on ρ.
        high: Upper bound on ρ, the C of truncated importance sampling.
        filters: Rejection on top; everything must pass every filter.
        veto_floor: Drop a sequence that holds a ρ under this.
        tv_delta: δ of the DPPO total-variation mask; needs advantages.
        off_policy_delta: δ of DeepSeek-V3.2's off-policy mask, in nats a token; needs advantages.
        denominator: What a mean loss divides by after rejection: ``"fixed"``, all response tokens
            (or sequences), or ``"kept"``, those not dropped.
        batch_normalize: Divide the weights by their mean over that denominator.
        adaptive_kl_scale: κ of adaptive importance sampling, in nats; None turns it off.
        on_invalid: ``"raise"`` if a response token has a NaN, infinite or positive log-probability,
            or ``"mask"`` to drop such tokens and report their share as ``invalid_fraction``.

    Raises:
        ConfigError: A field is outside its range, or two contradict each other.

    Example:
        >>> CorrectionConfig(level="sequence", bound="mask", high=3.0).denominator
        'fixed'
    """

    name: str = "custom"
    objective: str = "decoupled"
    level: str = "token"
    bound: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    filters: tuple[Filter, ...] = attrs.field(default=(), converter=_as_filters)
    veto_floor: float | None = None
    tv_delta: float | None = None
    off_policy_delta: float | None = None
    denominator: str = "fixed"
    batch_normalize: bool = False
    adaptive_kl_scale: float | None = None
    on_invalid: str = "raise"

    def __attrs_post_init__(self) -> None:
        faults = [
            f"{field} is {getattr(self, field)!r}; allowed: {', '.join(map(repr, allowed))}"
            for field, allowed in _CHOICES.items()
            if getattr(self, field) not in allowed
        ]
        if not 0 <= self.low <= self.high or self.high == 0:
            faults.append(f"low {self.low} and high {self.high} must be 0 <= low <= high, high > 0")
        if self.veto_floor is not None and not 0 < self.veto_floor <= 1:
            faults.append(f"veto_floor is a ratio in (0, 1], got {self.veto_floor}")
        for field in ("tv_delta", "off_policy_delta", "adaptive_kl_scale"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                faults.append(f"{field} must be positive and finite, got {value}")
        if self.level != "none" and self.objective == "bypass":
            faults.append(
                "objective 'bypass' already has π/μ as its PPO ratio; a weight would count it "
                "twice: use level 'none'"
            )
        if self.level == "none" and (self.batch_normalize or self.adaptive_kl_scale):
            faults.append("level 'none' has no weights to normalize or to mix")
        if faults:
            raise ConfigError(f"correction {self.name!r}: " + "; ".join(faults))

    @property
    def needs_advantages(self) -> bool:
        """Whether a mask depends on the sign of the advantage."""
        return self.tv_delta is not None or self.off_policy_delta is not None


def _ratio_filter(over: str, low: float, high: float) -> tuple[Filter, ...]:
    return (Filter(statistic="ratio", over=over, low=low, high=high),)


PRESETS: Mapping[str, CorrectionConfig] = MappingProxyType(
    {
        config.name: config
        for config in (
            CorrectionConfig(name="default"),
            CorrectionConfig(name="off", level="none"),
            CorrectionConfig(name="flashrl_c2", high=2.0),
            CorrectionConfig(name="flashrl_c8", high=8.0),
            CorrectionConfig(name="verl", high=2.0),
            CorrectionConfig(name="openrlhf", bound="mask", low=0.5, high=5.0),
            CorrectionConfig(name="trl", level="sequence", bound="mask", high=3.0),
            CorrectionConfig(
                name="skyrl_geometric", level="none", filters=_ratio_filter("mean", 0.99, 1.01)
            ),
            CorrectionConfig(name="nemo_rl_icepop", bound="mask", low=0.5, high=5.0),
            CorrectionConfig(
                name="nemo_rl_seq_mask_tis",
                bound="none",
                filters=_ratio_filter("mean", 0.999, 1.002),
            ),
            CorrectionConfig(
                name="prime_rl_dppo_tv", objective="policy_gradient", bound="none", tv_delta=0.2
            ),
            CorrectionConfig(name="bypass", objective="bypass", level="none"),
            CorrectionConfig(name="ais", adaptive_kl_scale=0.01),
        )
    }
)
"""Configurations that others publish, by their source, after ``default`` (ours) and ``off``.

``flashrl_c2`` is what FlashRL used for 0.5B on GSM8K, ``flashrl_c8`` for 32B on DAPO.
"""


def get_config(config: str | CorrectionConfig) -> CorrectionConfig:
    """Look a configuration up by name; a configuration passes through.

    Args:
        config: The name of a preset, or a ready configuration.

    Returns:
        The configuration.

    Raises:
        UnknownNameError: No preset has that name; the message lists all.

    Example:
        >>> get_config("flashrl_c8").high
        8.0
    """
    if isinstance(config, CorrectionConfig):
        return config
    if config not in PRESETS:
        raise UnknownNameError(f"unknown correction {config!r}; known: {', '.join(PRESETS)}")
    return PRESETS[config]


class Correction(NamedTuple):
    """What :func:`compute` returns; unpacks into weights and metrics.

    Args:
        weights: Factor of each token's loss, (batch, response_length), detached; 0 is a token that
            was masked or dropped.
        metrics: Everything of :mod:`flashrl.core.mismatch`: the ratio as it was, the weights after
            truncation and rejection, before they are normalized or mixed.  Beside it the flag
            ``all_dropped``, and ``batch_norm_factor`` or ``ais_coefficient`` where one applies.
    """

    weights: torch.Tensor
    metrics: dict[str, float]


def compute(
    *,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    old_log_probs: torch.Tensor | None = None,
    log_probs: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    log_mass: torch.Tensor | None = None,
    config: str | CorrectionConfig = "default",
    group: torch.distributed.ProcessGroup | None = None,
) -> Correction:
    """Compute the importance weights of a batch, and measure the mismatch.

    Args:
        rollout_log_probs: log μ of the sampled tokens in nats, (batch, response_length).
        response_mask: 1 where a token was sampled, the same shape.  What masked positions hold
            never matters.
        old_log_probs: log π of the policy that was synced, the same shape; for objective
            ``"decoupled"``.
        log_probs: log π of the current policy, the same shape; for ``"bypass"`` and
            ``"policy_gradient"``, where the old one would be the rollout's own and every metric 0
            (verl#4070).
        advantages: (batch, response_length) or (batch,); only their sign is used, by the masks
            that need it.
        log_mass: log S, where top-k, top-p or min-p truncated the support to mass S, the same
            shape.  μ was renormalized by S and π was not: without it every ρ is biased towards S.
        config: A preset's name, or a configuration.
        group: Ranks that hold other sequences of the same batch: metrics, normalization and the
            mixing coefficient are then those of the whole batch.

    Returns:
        ``(weights, metrics)``.

    Raises:
        UnknownNameError: No preset has that name.
        ConfigError: The configuration needs an argument that was not given.
        ShapeError: Tensors disagree in shape, dtype or device.
        NonFiniteError: A response token has a NaN, infinite or positive log-probability.

    Example:
        >>> weights, metrics = compute(old_log_probs=torch.tensor([[-1.0, -1.0]]),
        ...                            rollout_log_probs=torch.tensor([[-1.0, -3.0]]),
        ...                            response_mask=torch.ones(1, 2))
        >>> weights, metrics["truncated_fraction"]
        (tensor([[1., 2.]]), 0.5)
    """
    config = get_config(config)
    name = "old_log_probs" if config.objective == "decoupled" else "log_probs"
    policy = old_log_probs if config.objective == "decoupled" else log_probs
    if policy is None:
        raise ConfigError(
            f"correction {config.name!r} compares the rollout with {name}, which were not given"
        )
    if config.needs_advantages and advantages is None:
        raise ConfigError(
            f"correction {config.name!r} masks by the sign of the advantages: pass them"
        )
    named = {name: policy, "rollout_log_probs": rollout_log_probs}
    if log_mass is not None:
        named["log_mass"] = log_mass
    check_tensors(response_mask, **named)
    if advantages is not None:
        advantages = check_advantages(advantages, response_mask)

    weights = torch.zeros(
        response_mask.shape,
        dtype=torch.promote_types(
            torch.promote_types(policy.dtype, rollout_log_probs.dtype), torch.float32
        ),
        device=response_mask.device,
    )
    state = MismatchState.empty(response_mask.device)
    for block in iter_blocks(policy, rollout_log_probs, response_mask, log_mass):
        block_advantages = None if advantages is None else advantages[block.rows]
        block_weights, num_truncated = _weigh(block, config, block_advantages)
        weights[block.rows] = block_weights
        state += measure_block(block, block_weights, num_truncated)
    if group is not None:
        state = state.all_reduce(group)
    metrics = state.compute()
    if metrics["invalid_fraction"] > 0 and config.on_invalid == "raise":
        raise_invalid(response_mask, **named)
    _rescale(weights, metrics, config)
    return Correction(weights, metrics)


def _weigh(
    block: RowBlock, config: CorrectionConfig, advantages: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a block, and how many ratios of each row a bound changed.

    - Token TIS: w = min(ρ, C) (Yao et al. 2025, "Your efficient RL framework secretly brings you
      off-policy RL training").
    - Sequence TIS and masked IS: ρ = exp Σℓ (Liu et al. 2025, "When speed kills stability").
    - Geometric: ρ = exp(Σℓ / n), the length-free ratio of GSPO (arXiv:2507.18071).
    - IcePop: w = ρ · 1[α ≤ ρ ≤ β] (Ling team 2025).
    - seq-mask-TIS: w = ρ, where the geometric mean passes a filter (NeMo-RL).
    """
    if config.level == "token":
        ratio = bounded_exp(block.log_ratio)
    elif config.level == "sequence":
        ratio = bounded_exp(block.sequence_log_ratio).unsqueeze(-1)
    elif config.level == "geometric":
        ratio = bounded_exp(block.mean_log_ratio).unsqueeze(-1)
    else:
        ratio = torch.ones_like(block.mask)

    num_truncated = torch.zeros_like(block.num_tokens)
    if config.level == "none" or config.bound == "none":
        weights = ratio
    elif config.bound == "truncate":
        weights = ratio.clamp(config.low, config.high)
        num_truncated = ((weights - ratio).sign_().abs_() * block.mask).sum(dim=-1)
    else:
        weights = ratio * ((ratio >= config.low) & (ratio <= config.high))

    weights = weights * block.mask
    for keeps in _kept(block, config, advantages):
        weights = weights * keeps
    return weights, num_truncated


def _kept(
    block: RowBlock, config: CorrectionConfig, advantages: torch.Tensor | None
) -> Iterable[torch.Tensor]:
    for criterion in config.filters:
        yield criterion.keeps(block)
    if config.veto_floor is not None:
        yield without_vetoed(block, floor=config.veto_floor)
    if advantages is None:
        return
    if config.tv_delta is not None:
        yield within_total_variation(block, advantages, delta=config.tv_delta)
    if config.off_policy_delta is not None:
        yield within_off_policy_limit(block, advantages, delta=config.off_policy_delta)


def _rescale(weights: torch.Tensor, metrics: dict[str, float], config: CorrectionConfig) -> None:
    """Apply what depends on the whole batch to the weights, and add it to the metrics.

    Batch normalization makes the mean weight 1: self-normalized importance sampling.

    Adaptive importance sampling (AIS, arXiv:2605.13907) mixes uncorrected and corrected gradients
    by how reliable the weights are, how severe the divergence is and how much variance the weights
    add: w ← 1 - α + α w.  The coefficient here is our reading of these three:
    α = ESS(w) · (1 - exp(-k3 / κ)) / max(1, E[ρ²]).
    """
    num_responses = metrics["num_tokens"] or metrics["invalid_fraction"]
    is_empty = metrics["num_tokens"] == 0 or metrics["dropped_fraction"] == 1.0
    metrics["all_dropped"] = float(num_responses > 0 and is_empty)
    if metrics["all_dropped"]:
        _LOGGER.warning("correction %r dropped every token of the batch", config.name)
    if is_empty:
        return
    if config.batch_normalize:
        level = "sequence_" if config.level != "token" else ""
        kept = 1 - metrics[f"dropped_{level}fraction"] if config.denominator == "kept" else 1.0
        metrics["batch_norm_factor"] = metrics[f"weight_{level}mean"] / kept
        weights /= metrics["batch_norm_factor"]
    if config.adaptive_kl_scale is not None:
        severity = -math.expm1(-metrics["k3"] / config.adaptive_kl_scale)
        amplification = max(1.0, 1 + metrics["chi2_token"])
        alpha = metrics["weight_ess"] * severity / amplification
        metrics["ais_coefficient"] = alpha
        mixed = weights * alpha + (1 - alpha)
        weights.copy_(mixed * (weights != 0))
