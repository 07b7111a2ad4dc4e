"""TRL: its own GRPO trainer with 8-bit vLLM, and one that generates with a flashrl session."""

from flashrl.trainers.trl.adapter import TRLAdapter

__all__ = ["TRLAdapter"]
