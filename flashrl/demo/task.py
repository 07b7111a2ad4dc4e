"""The demo's task: sums of two one-digit numbers, and rewards that rules compute."""

from __future__ import annotations

import random
import re
from typing import Any

__all__ = ["REWARDS", "accuracy", "form", "make_prompts"]

_EXAMPLE = "1 + 1 = 2\n"
_FIRST_NUMBER = re.compile(r"\s*(\d+)")
_NUMBER_AND_LINE_END = re.compile(r"\s*\d+\n")


def make_prompts(count: int, *, seed: int) -> list[dict[str, str]]:
    r"""Prompts that show one sum and ask for another, with their ``answer``.

    Args:
        count: How many; prompts repeat, since there are only 81.
        seed: Which ones.

    Example:
        >>> make_prompts(1, seed=0)
        [{'prompt': '1 + 1 = 2\n7 + 7 =', 'answer': '14'}]
    """
    draw = random.Random(seed)  # noqa: S311 - exercises, not secrets
    prompts = []
    for _ in range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        prompts.append({"prompt": f"{_EXAMPLE}{a} + {b} =", "answer": str(a + b)})
    return prompts


def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where a completion starts with the right number.

    Example:
        >>> accuracy([" 12", " 12, so the", " 120", " five"], ["12"] * 4)
        [1.0, 1.0, 0.0, 0.0]
    """
    starts = (_FIRST_NUMBER.match(completion) for completion in completions)
    return [
        float(start is not None and int(start[1]) == int(right))
        for start, right in zip(starts, answer, strict=True)
    ]


def form(completions: list[str], **_: Any) -> list[float]:
    r"""1 where a completion is one number that ends the line, and nothing else.

    Example:
        >>> form([" 12\n", " 12, so the", " 12"])
        [1.0, 0.0, 0.0]
    """
    return [float(_NUMBER_AND_LINE_END.fullmatch(text) is not None) for text in completions]


REWARDS = {accuracy: 1.0, form: 0.5}
"""What each rule counts; the best answer earns their sum."""
