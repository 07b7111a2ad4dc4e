"""The rules that reward, against answers counted by hand."""

from __future__ import annotations

import pytest

from flashrl.demo.task import REWARDS, accuracy, form, make_prompts


@pytest.mark.parametrize(
    ("completion", "right", "well_formed"),
    [
        (" 12\n", 1, 1),
        ("12\n", 1, 1),
        (" 12", 1, 0),  # cut off before the line ended
        (" 12, so the", 1, 0),
        (" 12 or 13\n", 1, 0),
        (" 120\n", 0, 1),
        (" 1\n", 0, 1),
        (" 1 2\n", 0, 0),
        (" -12\n", 0, 0),
        ("twelve\n", 0, 0),
        ("", 0, 0),
        ("\n", 0, 0),
    ],
)
def test_rewards(completion: str, right: float, well_formed: float) -> None:
    assert accuracy([completion], ["12"]) == [right]
    assert form([completion], answer=["12"]) == [well_formed]


def test_every_prompt_asks_for_its_answer() -> None:
    prompts = make_prompts(500, seed=7)
    for prompt in prompts:
        example, question = prompt["prompt"].split("\n")
        assert example == "1 + 1 = 2"
        a, plus, b, equals = question.split()
        assert (plus, equals) == ("+", "=")
        assert int(a) in range(1, 10)
        assert int(b) in range(1, 10)
        assert prompt["answer"] == str(int(a) + int(b))
    assert len({prompt["prompt"] for prompt in prompts}) > 70


def test_prompts_follow_the_seed() -> None:
    assert make_prompts(20, seed=1) == make_prompts(20, seed=1) != make_prompts(20, seed=2)


def test_best_answer_earns_all() -> None:
    earned = sum(weight * rule([" 12\n"], answer=["12"])[0] for rule, weight in REWARDS.items())
    assert earned == sum(REWARDS.values()) == 1.5
