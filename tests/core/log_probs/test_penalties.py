"""Counting what was said: padding, prefixes, and ids that are no tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.log_probs.penalties import TokenHistory
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import RolloutError, ShapeError

VOCAB = 8


def test_padding_of_the_prompt_is_not_part_of_it() -> None:
    """The pad token, often end-of-sequence, is not penalised for padding a shorter prompt."""
    prompts = torch.tensor([[7, 7, 1], [2, 3, 1], [1, -100, -100]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1], [1, 0, 0]])
    history = TokenHistory.start(prompts, vocab_size=VOCAB, prompt_mask=mask)
    assert [row.nonzero().flatten().tolist() for row in history.in_prompt] == [[1], [1, 2, 3], [1]]


def test_an_empty_prompt_is_no_special_case() -> None:
    history = TokenHistory.start(torch.empty(2, 0, dtype=torch.int64), vocab_size=VOCAB)
    assert not history.in_prompt.any()


def test_a_finished_sequence_is_not_counted() -> None:
    history = TokenHistory.start(torch.zeros(2, 1, dtype=torch.int64), vocab_size=VOCAB)
    history.append(torch.tensor([5, 6]), torch.tensor([True, False]))
    history.append(torch.tensor([5, 10_000]), torch.tensor([True, False]))
    assert history.counts.sum(-1).tolist() == [2, 0]
    assert history.counts[0, 5] == 2


def test_penalties_by_hand() -> None:
    """Repetition divides 2 and multiplies -1 by 2; frequency takes 0.5 each, presence 0.25 once."""
    history = TokenHistory.start(torch.tensor([[0]]), vocab_size=4)
    history.append(torch.tensor([[1, 1]]))
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    penalised = history.penalize(torch.tensor([[2.0, -1.0, 2.0, 0.0]]), params)
    assert penalised.tolist() == [[1.0, -2.0 - 1.0 - 0.25, 2.0, 0.0]]


@given(
    st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 11),
)
def test_law_a_prefix_holds_what_was_appended_before(
    tokens: list[tuple[int, bool]], start: int
) -> None:
    start %= len(tokens)
    ids, mask = (torch.tensor([column]) for column in zip(*tokens, strict=True))
    history = TokenHistory.start(torch.tensor([[3]]), vocab_size=VOCAB)
    history.append(ids[:, :start], mask[:, :start])
    prefixes = history.prefixes(ids[:, start:], mask[:, start:])
    for offset in range(len(tokens) - start):
        expected = Counter(token for token, counted in tokens[: start + offset] if counted)
        assert prefixes.counts[0, offset].tolist() == [expected[token] for token in range(VOCAB)]
        assert prefixes.in_prompt[0, offset].nonzero().item() == 3
    without_mask = history.prefixes(ids[:, start:])
    assert without_mask.counts[0, -1].sum() == history.counts.sum() + len(tokens) - start - 1


@pytest.mark.parametrize(
    ("prompts", "mask", "error", "message"),
    [
        (torch.tensor([1, 2]), None, ShapeError, "allowed: \\(batch, prompt_length\\)"),
        (torch.tensor([[1.0]]), None, ShapeError, "allowed: an integer type"),
        (torch.tensor([[1, 2]]), torch.tensor([[1]]), ShapeError, "its mask \\(1, 1\\)"),
        (torch.tensor([[1], [VOCAB]]), None, RolloutError, "prompt_ids\\[1, 0\\] is 8, outside"),
        (torch.tensor([[-100]]), None, RolloutError, "prompt_ids\\[0, 0\\] is -100, outside"),
    ],
)
def test_prompts_that_are_none_are_an_error(
    prompts: torch.Tensor, mask: torch.Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TokenHistory.start(prompts, vocab_size=VOCAB, prompt_mask=mask)
