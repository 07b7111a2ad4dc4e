"""What the demo runs: three arms that differ in how rollouts are generated, and nothing else."""

from __future__ import annotations

from pathlib import Path

import attrs

__all__ = ["RUNS", "DemoPlan", "DemoRun"]


@attrs.frozen(kw_only=True)
class DemoRun:
    """One arm of the comparison.

    Args:
        name: Short; its records go to ``run-<name>.jsonl``.
        title: For people.
        scheme: How the rollout engine stores its linear weights; ``"bf16"`` leaves them as they
            are, which on a CPU is FP32, like the trainer's.
        correction: A preset of :mod:`flashrl.core.correction`.
    """

    name: str
    title: str
    scheme: str
    correction: str


RUNS = (
    DemoRun(name="unquantized", title="Unquantized", scheme="bf16", correction="off"),
    DemoRun(name="int8-corrected", title="INT8, corrected", scheme="int8", correction="flashrl_c2"),
    DemoRun(name="int8-uncorrected", title="INT8, uncorrected", scheme="int8", correction="off"),
)


@attrs.frozen(kw_only=True)
class DemoPlan:
    """What all arms share.

    Args:
        model: A checkpoint's folder.
        output: Where records go; it exists.
        num_steps: Optimizer steps of each run.
        seed: Of prompts, sampling and everything else.
        num_prompts: Prompts a step.
        num_generations: Completions of each prompt, GRPO's group.
        max_tokens: Longest completion.
        learning_rate: Of AdamW, constant.
        runs: The arms, in order.
    """

    model: Path
    output: Path
    num_steps: int = 16
    seed: int = 0
    num_prompts: int = 8
    num_generations: int = 4
    max_tokens: int = 5
    learning_rate: float = 4e-6
    runs: tuple[DemoRun, ...] = RUNS
