"""verl: its unchanged trainer with 8-bit rollouts."""

from flashrl.trainers.verl.adapter import VerlAdapter

__all__ = ["VerlAdapter"]
