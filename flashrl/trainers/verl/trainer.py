"""verl's trainer: its configuration is checked, and its sync measured."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashrl.core.config import Config, load_config
from flashrl.core.schemes import QuantScheme
from flashrl.errors import ConfigError
from flashrl.trainers import guards
from flashrl.trainers.metrics import PREFIX, scheme_metrics
from flashrl.trainers.verl.options import SECTION, is_on, write_options

__all__ = ["measured", "prepare", "prepared", "with_vocabulary_check"]

logger = logging.getLogger(__name__)

_Method = Callable[..., Any]


def prepare(config: Any, flashrl: Config) -> None:
    """Make a verl configuration fit for quantized rollouts, and warn of what is missing.

    The log-probabilities of sampled tokens are turned on, for without them nothing can be measured
    or corrected.  A correction that FLASHRL_CONFIG names is put in unless the script has one.

    Args:
        config: verl's, an OmegaConf tree, changed in place.
        flashrl: What FLASHRL_CONFIG says.

    Raises:
        ConfigError: FLASHRL_CONFIG names several corrections.
    """
    from omegaconf import OmegaConf, open_dict

    rollout = config.actor_rollout_ref.rollout
    if not rollout.calculate_log_probs:
        logger.warning("rollout.calculate_log_probs is turned on, to measure the mismatch")
        with open_dict(rollout):
            rollout.calculate_log_probs = True
    section = OmegaConf.select(config, SECTION) or {}
    named = sorted({entry.correction for entry in flashrl.entries if entry.correction})
    if len(named) > 1:
        raise ConfigError(f"{flashrl.source} names several corrections: {named}; a loss has one")
    if named and not is_on(section):
        for key, value in write_options(named[0]).items():
            OmegaConf.update(config, key.lstrip("+"), value, force_add=True)
        section = OmegaConf.select(config, SECTION)
    _check_bypass(section, config.actor_rollout_ref.actor.policy_loss.loss_mode)
    guards.check_correction(
        schemes_of(flashrl), corrected=is_on(section), remedy=f"{SECTION}.rollout_is=token"
    )


def _check_bypass(section: Mapping[str, Any], loss_mode: str) -> None:
    """Warn once of options that verl's V1 trainer does not read in bypass mode."""
    if not section.get("bypass_mode") or loss_mode == "bypass_mode":
        return
    options = {"loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None}
    ignored = [f"{k}={section.get(k)}" for k, v in options.items() if section.get(k, v) != v]
    if ignored:
        guards.warn_once(
            "bypass options",
            f"{SECTION}.bypass_mode is on, and this trainer then ignores {', '.join(ignored)}, "
            "unless policy_loss.loss_mode is bypass_mode and policy_loss.rollout_correction has "
            "them too",
        )


def schemes_of(flashrl: Config) -> list[QuantScheme]:
    """The scheme of each kind of replica."""
    return [entry.quant_scheme for entry in flashrl.entries]


def prepared(init: _Method) -> _Method:
    """``__init__`` of a trainer, with its configuration prepared first."""

    @functools.wraps(init)
    def with_preparation(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        flashrl = load_config()
        if flashrl is not None:
            prepare(config, flashrl)
        init(self, config, *args, **kwargs)

    return with_preparation


def with_vocabulary_check(init_tokenizer: _Method) -> _Method:
    """``_init_tokenizer`` of a trainer; then the model's vocabulary is held against it.

    verl bars ids past the tokenizer in vLLM, and not in the trainer's softmax.
    """

    @functools.wraps(init_tokenizer)
    def with_check(self: Any) -> None:
        from verl.utils.config import omega_conf_to_dataclass

        init_tokenizer(self)
        hf_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.model).hf_config
        text_config = hf_config.get_text_config()
        guards.check_vocabulary(text_config.vocab_size, num_tokens=len(self.tokenizer), masked=True)

    return with_check


def measured(compute_metrics: _Method) -> _Method:
    """``_compute_metrics`` of a trainer; then what it knows of the sync, under our names."""

    @functools.wraps(compute_metrics)
    def with_sync(
        self: Any, batch: Any, metrics: dict[str, Any], timing_raw: Mapping[str, float], **kw: Any
    ) -> None:
        compute_metrics(self, batch, metrics, timing_raw, **kw)
        metrics.update(sync_metrics(metrics, timing_raw, schemes_of(_config())))

    return with_sync


def _config() -> Config:
    config = load_config()
    return config if config is not None else load_config("bf16")


def sync_metrics(
    metrics: Mapping[str, Any], timing_raw: Mapping[str, float], schemes: Iterable[QuantScheme]
) -> dict[str, float]:
    """Milliseconds and lag of the newest sync, and the schemes.

    Args:
        metrics: verl's, of this step.
        timing_raw: Seconds of each part of this step.
        schemes: One for each kind of replica.
    """
    found = scheme_metrics(schemes)
    if "update_weights" in timing_raw:
        found[f"{PREFIX}update_ms"] = 1000 * float(timing_raw["update_weights"])
    lag = metrics.get("training/off_policy/trajectory_staleness/mean")
    if lag is not None:
        found[f"{PREFIX}version_lag"] = float(lag)
    return found
