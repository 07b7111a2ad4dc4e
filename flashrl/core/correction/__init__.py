"""Importance weights that correct for the rollout's distribution not being the trainer's.

π is the trainer's policy at the sync (``old_log_probs``; in bypass and policy-gradient mode the
current one, ``log_probs``), μ the distribution really sampled from (``rollout_log_probs``),
ρ = π/μ.  A weight of 0 means the token was dropped: masked, rejected or invalid.  So one tensor
carries both the correction and the rejection mask, and
:func:`flashrl.core.correction.losses.policy_loss` needs nothing else.
"""

from __future__ import annotations

from flashrl.core.correction.weights import (
    PRESETS,
    Correction,
    CorrectionConfig,
    compute,
    get_config,
)

__all__ = ["PRESETS", "Correction", "CorrectionConfig", "compute", "get_config"]
