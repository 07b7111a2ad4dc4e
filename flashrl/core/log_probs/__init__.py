"""Log-probabilities of sampled tokens under the distribution they were sampled from.

Dividing logits by the temperature and dividing log-probabilities by it are different things: of
logits [2, 1, 0] at T = 0.5, token 0 has log_softmax([4, 2, 0])[0] = -0.1429, not -0.4076 / 0.5.

Whole responses are scored a block of positions at a time, so that no more than ``chunk_size`` rows
of logits exist in float32 at once, forward and backward.
"""

from __future__ import annotations

from flashrl.core.log_probs.sampled import (
    LogProbs,
    compute_log_probs,
    compute_log_probs_from_hidden,
)

__all__ = ["LogProbs", "compute_log_probs", "compute_log_probs_from_hidden"]
