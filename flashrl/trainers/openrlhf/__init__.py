"""OpenRLHF: its unchanged trainer with 8-bit rollouts."""

from flashrl.trainers.openrlhf.adapter import OpenRLHFAdapter

__all__ = ["OpenRLHFAdapter"]
