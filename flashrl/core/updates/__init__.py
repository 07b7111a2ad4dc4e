"""A push of weights: its names and tensors, the book kept of it, and the proof afterwards."""

from __future__ import annotations

from flashrl.core.updates.ledger import UpdateLedger, load_each

__all__ = ["UpdateLedger", "load_each"]
