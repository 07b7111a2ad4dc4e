"""Guards: what a training step survives, what it does not, and what is said."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from flashrl.core.schemes import get_scheme
from flashrl.errors import RolloutError, ShapeError
from flashrl.trainers import guards

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_warned", set())


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.5, 0.0])
def test_an_unusable_token_is_masked_and_its_ratio_is_one(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A NaN times a weight of 0 was a NaN gradient in verl."""
    old = rows([-1.0, -2.0, -3.0])
    with caplog.at_level(logging.WARNING):
        screened = guards.screen(
            rows([-1.5, bad, -2.5]), response_mask=torch.ones(1, 3), old_log_probs=old
        )
    assert screened.response_mask.tolist() == [[1, 0, 1]]
    assert screened.rollout_log_probs.tolist() == [[-1.5, -2.0, -2.5]]
    assert (screened.num_unusable, screened.num_tokens) == (1, 3)
    assert "1 of 3 tokens, first [0, 1]" in caplog.text


def test_zero_counts_as_missing_only_where_the_trainer_disagrees() -> None:
    """vime#70: a missing log-probability is never 0.0; a certain token has just that."""
    log_probs = rows([0.0, 0.0, -1.0])
    old = rows([-0.01, -4.0, -1.0])
    screened = guards.screen(log_probs, response_mask=torch.ones(1, 3), old_log_probs=old)
    assert screened.response_mask.tolist() == [[1, 0, 1]]
    assert (screened.num_unusable, screened.num_missing) == (1, 1)


def test_without_the_trainers_values_a_response_of_zeros_is_missing() -> None:
    log_probs = rows([0.0, 0.0, -9.0], [0.0, -1.0, 0.0])
    mask = rows([1, 1, 0], [1, 1, 1]).long()
    screened = guards.screen(log_probs, response_mask=mask)
    assert screened.response_mask.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert screened.response_mask.dtype == mask.dtype
    assert screened.num_missing == 2


def test_masked_positions_do_not_matter() -> None:
    """flash-rl#19: mask 0 with any value, NaN included."""
    mask = rows([1, 0, 0])
    screened = guards.screen(
        rows([-1.0, NAN, 7.0]), response_mask=mask, old_log_probs=rows([-1.0, NAN, -2.0])
    )
    assert screened.num_unusable == 0
    assert screened.response_mask.tolist() == mask.tolist()
    assert screened.rollout_log_probs.isfinite().all()


def test_a_batch_without_a_usable_token_says_so() -> None:
    """verl#3984: nothing left is a case of its own, not an error."""
    screened = guards.screen(rows([NAN, NAN]), response_mask=torch.ones(1, 2))
    assert screened.all_unusable
    assert not guards.screen(rows([NAN]), response_mask=torch.zeros(1, 1)).all_unusable


def test_a_good_batch_passes_untouched_and_silently(caplog: pytest.LogCaptureFixture) -> None:
    log_probs = rows([-1.0, -2.0])
    screened = guards.screen(log_probs, response_mask=torch.ones(1, 2), old_log_probs=log_probs)
    assert torch.equal(screened.rollout_log_probs, log_probs)
    assert screened.num_unusable == 0
    assert not caplog.records


def test_values_that_do_not_line_up_are_an_error() -> None:
    mask = torch.ones(1, 3)
    with pytest.raises(RolloutError, match="brought no log-probabilities"):
        guards.screen(None, response_mask=mask)
    with pytest.raises(ShapeError, match=r"rollout_log_probs has shape \(1, 2\), response_mask"):
        guards.screen(rows([-1.0, -1.0]), response_mask=mask)
    with pytest.raises(ShapeError, match=r"old_log_probs has shape \(1, 1\)"):
        guards.screen(torch.zeros(1, 3), response_mask=mask, old_log_probs=rows([-1.0]))


def test_a_kind_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        guards.screen(rows([NAN]), response_mask=torch.ones(1, 1))
        guards.screen(rows([INF]), response_mask=torch.ones(1, 1))
    assert len(caplog.records) == 2


def test_lists_become_a_padded_tensor_in_which_a_gap_is_nan() -> None:
    padded = guards.pad_rows([[-0.5, None], [], [-1.0]], lengths=[2, 0, 1], width=3)
    expected = rows([-0.5, NAN, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 0.0])
    torch.testing.assert_close(padded, expected, equal_nan=True)
    assert guards.pad_rows([], lengths=[]).shape == (0, 0)


def test_lists_of_another_length_are_an_error() -> None:
    """vime#70: a length mismatch is never padded or cut."""
    with pytest.raises(RolloutError, match="response 1 has 2 tokens and 1 log-probabilities"):
        guards.pad_rows([[-1.0], [-1.0]], lengths=[1, 2])
    with pytest.raises(RolloutError, match="2 rows of log-probabilities for 1 responses"):
        guards.pad_rows([[], []], lengths=[0])


@pytest.mark.parametrize(
    ("schemes", "corrected", "warned"),
    [
        (["int8"], False, True),
        (["bf16", "fp8"], False, True),
        (["int8"], True, False),
        (["bf16"], False, False),
    ],
)
def test_quantized_rollouts_without_a_correction_are_warned_of(
    schemes: list[str], corrected: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = [get_scheme(name) for name in schemes]
    guards.check_correction(found, corrected=corrected, remedy="rollout_is=token")
    assert bool(caplog.records) is warned
    assert ("turn it on with rollout_is=token" in caplog.text) is warned


def test_a_vocabulary_larger_than_the_tokenizer_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guards.check_vocabulary(320, num_tokens=320, masked=True)
    guards.check_vocabulary(320, num_tokens=321, masked=False)
    assert not caplog.records
    guards.check_vocabulary(384, num_tokens=320, masked=True)
    assert "384 logits and the tokenizer 320 tokens: of the 64 others" in caplog.text
