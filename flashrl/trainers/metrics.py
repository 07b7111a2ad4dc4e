"""One vocabulary of metrics for every trainer's log: ``flashrl/<name>``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs
from torch import Tensor

from flashrl.core.correction import CorrectionConfig, compute, get_config
from flashrl.core.schemes import QuantScheme

__all__ = ["METRICS", "PREFIX", "compute_metrics", "measure_correction", "scheme_metrics"]

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


def compute_metrics(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    correction: str | CorrectionConfig = "off",
    num_unusable: int | None = None,
    update_ms: float | None = None,
    version_lag: float | None = None,
    scheme: str | None = None,
) -> dict[str, float | str]:
    """Measure a batch, under the names that every trainer logs.

    Args:
        old_log_probs: log π of the trainer, (batch, response_length).
        rollout_log_probs: log μ, the same shape.
        response_mask: 1 where a token counts, the same shape.
        advantages: (batch, response_length) or (batch,); a mask by their sign is left out of the
            measurement without them.
        correction: What the trainer does with the ratios, in this library's words.
        num_unusable: As :class:`~flashrl.trainers.guards.Screened` counts.
        update_ms: Milliseconds of the newest weight sync.
        version_lag: Syncs between the weights that sampled and those that train.
        scheme: Its name.

    Returns:
        ``flashrl/<name>`` → value; what was not given is not there.

    Raises:
        ShapeError: Tensors disagree in shape.

    Example:
        >>> import torch
        >>> log_probs = torch.tensor([[-1.0, -1.0]])
        >>> metrics = compute_metrics(
        ...     old_log_probs=log_probs, rollout_log_probs=log_probs - torch.tensor([[0.0, 2.0]]),
        ...     response_mask=torch.ones(1, 2), correction="default", scheme="int8")
        >>> metrics["flashrl/frac_truncated"], metrics["flashrl/scheme"]
        (0.5, 'int8')
    """
    _, measured = measure_correction(
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
        advantages=advantages,
        correction=correction,
    )
    beside = {
        "num_unusable": num_unusable,
        "update_ms": update_ms,
        "version_lag": version_lag,
        "scheme": scheme,
    }
    return measured | {PREFIX + k: value for k, value in beside.items() if value is not None}


def measure_correction(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    correction: str | CorrectionConfig = "default",
) -> tuple[Tensor, dict[str, float | str]]:
    """The importance weights of a batch, with the metrics of :func:`compute_metrics`.

    Args:
        old_log_probs: log π of the trainer, (batch, response_length).
        rollout_log_probs: log μ, the same shape.
        response_mask: 1 where a token counts, the same shape.
        advantages: As :func:`compute_metrics` takes them.
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
