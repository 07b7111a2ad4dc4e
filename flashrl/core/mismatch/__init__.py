"""How far the rollout's distribution is from the trainer's, measured on the sampled tokens.

ℓ = log π - log μ, ρ = exp(ℓ); every metric is a mean over the tokens that μ sampled, or an extreme.

- ``k1``, ``k2``, ``k3``: -ℓ, ℓ²/2 and ρ - 1 - ℓ, three estimates of KL(μ‖π) (Schulman 2020,
  "Approximating KL divergence").
- ``reverse_k1``, ``reverse_k3``: ρℓ and ρℓ - ρ + 1, importance-weighted estimates of KL(π‖μ).
- ``js``: ½[ρℓ - (1+ρ) log((1+ρ)/2)], the Jensen-Shannon divergence (Lin 1991).
- ``chi2_token``, ``chi2_sequence``: E[ρ²] - 1, with the ρ of a token or the product over a sequence
  (verl, ``rollout_corr_helper``).
- ``ess``, ``ess_sequence``: E[ρ]² / E[ρ²], the effective share of the sample (Kish 1965).
- ``ppl_ratio``: exp(-E ℓ), the trainer's perplexity over the rollout's.
- ``tmpe``: ``E exp|ℓ|``, the multiplicative error of a token's probability (NeMo-RL).
- ``prob_diff_mean``, ``prob_diff_max``: of ``|π - μ|`` (prime-rl; DPPO, arXiv:2602.04879).
- ``log_ratio_*`` of ``|ℓ|``, ``ratio_*`` of ρ before and ``weight_*`` of the weights after
  truncation: standard deviation, 95th percentile, extremes and the share outside [0.9, 1.1],
  because a mean hides the spread (TRL#6789).

Averages of averages are wrong when shards differ in size (slime#429).  So a shard keeps sums,
extremes and histograms in a :class:`MismatchState`; states add up.
"""

from __future__ import annotations

from flashrl.core.mismatch.metrics import MismatchState, measure, measure_block
from flashrl.core.mismatch.positions import measure_positions

__all__ = ["MismatchState", "measure", "measure_block", "measure_positions"]
