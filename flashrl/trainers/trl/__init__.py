"""TRL: a GRPO trainer whose rollouts come from a flashrl session."""
