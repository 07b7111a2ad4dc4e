"""One vocabulary of metrics for every trainer's log: ``flashrl/<name>``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs
from torch import Tensor

from flashrl.core.correction import CorrectionConfig, compute, get_config
from flashrl.core.schemes import QuantScheme

__all__ = ["METRICS", "PREFIX", "measure_correction", "scheme_metrics"]

PREFIX = "flashrl/"

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "kl": "k3",
        "ess": "ess",
        "ratio_mean": "ratio_mean",
        "ratio_sd": "ratio_std",
        "ratio_p95": "ratio_p95",
        "ratio_max": "ratio_max",
        "frac_truncated": "truncated_fraction",
        "frac_dropped": "dropped_fraction",
    }
)
"""Name in a trainer's log, behind ``flashrl/`` → name in :mod:`flashrl.core.mismatch`.

Beside them stand ``update_ms``, milliseconds of the newest weight sync; ``version_lag``, syncs
between the weights that sampled and those that train; ``num_unusable``, tokens masked out because
their log-probability was no good; and ``scheme``.
"""


def measure_correction(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    correction: str | CorrectionConfig = "default",
) -> tuple[Tensor, dict[str, float | str]]:
    """The importance weights of a batch, and its metrics under the names that every trainer logs.

    Args:
        old_log_probs: log π of the trainer, (batch, response_length).
        rollout_log_probs: log μ, the same shape.
        response_mask: 1 where a token counts, the same shape.
        advantages: (batch, response_length) or (batch,); a mask by their sign is left out of the
            measurement without them.
        correction: How ratios become weights.

    Returns:
        The weights, (batch, response_length), and ``flashrl/<name>`` → value.
    """
    config = attrs.evolve(get_config(correction), on_invalid="mask")
    if config.needs_advantages and advantages is None:
        config = attrs.evolve(config, tv_delta=None, off_policy_delta=None)
    weights, metrics = compute(
        old_log_probs=old_log_probs,
        log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
        advantages=advantages,
        config=config,
    )
    return weights, {PREFIX + name: metrics[measured] for name, measured in METRICS.items()}


def scheme_metrics(schemes: Iterable[QuantScheme]) -> dict[str, float]:
    """Which share of the ranks generates in which scheme, for logs that take numbers only.

    Args:
        schemes: One for each kind of rank.

    Returns:
        ``flashrl/scheme/<name>`` → share.

    Example:
        >>> from flashrl.core.schemes import get_scheme
        >>> scheme_metrics([get_scheme("int8"), get_scheme("bf16")])
        {'flashrl/scheme/int8': 0.5, 'flashrl/scheme/bf16': 0.5}
    """
    counts = Counter(scheme.name for scheme in schemes)
    return {f"{PREFIX}scheme/{name}": n / counts.total() for name, n in counts.items()}
