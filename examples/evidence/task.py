"""What is learned: arithmetic that rules check, from two-digit sums to a hundred sums in a row."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import attrs

__all__ = ["TASKS", "Problem", "Task", "draw_problems"]

NUM_TERMS = 100
_NUMBER = re.compile(r"\d+")
_ONLY_A_NUMBER = re.compile(r"\s*\d+\.?\s*")
_STEP = re.compile(r"\s*(\d+) \+ (\d+) = (\d+)\s*")


@attrs.frozen(kw_only=True)
class Problem:
    """A question, and what its answer is checked against.

    Args:
        level: How hard it is: a key of its task's levels.
        question: What the user says.
        answer: The right number; of a chain, every running total, separated by spaces.
    """

    level: str
    question: str
    answer: str

    def row(self) -> dict[str, Any]:
        """What the trainer's data set holds."""
        return {"prompt": [{"role": "user", "content": self.question}], "answer": self.answer}


@attrs.frozen(kw_only=True)
class Task:
    """A kind of problem.

    Args:
        levels: Name → what draws a question and its answer.
        score: Of a completion and the answer, from 0 to 1; the mean over held-out problems is the
            accuracy.
        form: Of a completion: how well it keeps to what was asked for, from 0 to 1.
    """

    levels: Mapping[str, Callable[[random.Random], tuple[str, str]]]
    score: Callable[[str, str], float]
    form: Callable[[str], float]


def draw_problems(
    task: Task, count: int, *, seed: int | str, without: Sequence[Problem] = ()
) -> list[Problem]:
    """Problems of every level in turn.

    Args:
        task: A value of :data:`TASKS`.
        count: How many; easy levels repeat themselves.
        seed: Which ones.
        without: Questions that are not asked, for they are held out.
    """
    draw = random.Random(seed)  # noqa: S311 - exercises, not secrets
    excluded = {problem.question for problem in without}
    problems: list[Problem] = []
    names = list(task.levels)
    while len(problems) < count:
        level = names[len(problems) % len(names)]
        question, answer = task.levels[level](draw)
        if question not in excluded:
            problems.append(Problem(level=level, question=question, answer=answer))
    return problems


def _short(question: str, answer: int) -> tuple[str, str]:
    return f"{question} Reply with the number only.", str(answer)


def _sum(draw: random.Random, low: int, high: int) -> tuple[str, str]:
    a, b = draw.randint(low, high), draw.randint(low, high)
    return _short(f"What is {a} + {b}?", a + b)


def _product(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(2, 12), draw.randint(11, 99)
    return _short(f"What is {a} * {b}?", a * b)


def _two_step(draw: random.Random) -> tuple[str, str]:
    a, b, c = draw.randint(2, 9), draw.randint(2, 9), draw.randint(10, 99)
    question = f"{a} boxes hold {b} pens each, and {c} pens lie beside them."
    return _short(f"{question} How many pens are there?", a * b + c)


def _chain(draw: random.Random) -> tuple[str, str]:
    terms = [draw.randint(1, 9) for _ in range(NUM_TERMS)]
    question = (
        "Add these numbers one after the other, each step on a line of its own. For 4, 9, 5 write\n"
        "4 + 9 = 13\n13 + 5 = 18\n"
        f"Work out every step, to the last number. The numbers: {', '.join(map(str, terms))}"
    )
    return question, " ".join(map(str, accumulate(terms)))


def score_number(completion: str, answer: str) -> float:
    """1 if the first number is the right one.

    Example:
        >>> score_number(" 12.", "12"), score_number("It is 120", "12"), score_number("", "12")
        (1.0, 0.0, 0.0)
    """
    found = _NUMBER.search(completion)
    return float(found is not None and int(found[0]) == int(answer))


def score_chain(completion: str, answer: str) -> float:
    r"""Which share of the steps is right, up to the first that is not.

    Example:
        >>> score_chain("4 + 9 = 13\n13 + 5 = 19", "4 13 18")
        0.5
    """
    totals = list(map(int, answer.split()))
    right = 0
    lines = completion.strip().splitlines()
    for line, (before, after) in zip(lines, pairwise(totals), strict=False):
        step = _STEP.fullmatch(line)
        if step is None or tuple(map(int, step.groups())) != (before, after - before, after):
            break
        right += 1
    return right / (len(totals) - 1)


def _is_only_a_number(completion: str) -> float:
    return float(_ONLY_A_NUMBER.fullmatch(completion) is not None)


def _frac_steps(completion: str) -> float:
    lines = completion.strip().splitlines()
    return sum(_STEP.fullmatch(line) is not None for line in lines) / max(1, len(lines))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "short": Task(
            levels={
                "sum_2_digits": lambda draw: _sum(draw, 10, 99),
                "sum_3_digits": lambda draw: _sum(draw, 100, 999),
                "product": _product,
                "two_step": _two_step,
            },
            score=score_number,
            form=_is_only_a_number,
        ),
        # A step takes about twelve tokens, for digits are tokens: well over 1,024 in all.
        "chain": Task(levels={"chain": _chain}, score=score_chain, form=_frac_steps),
    }
)
"""Problems that a number answers, graded in difficulty; and one that takes long, worked answers."""
