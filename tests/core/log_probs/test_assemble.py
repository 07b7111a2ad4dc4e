"""From what engines hand over to aligned tensors; gaps are errors and never 0.0."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.log_probs.assemble import (
    assemble_rollout,
    check_rollout_log_probs,
    pick_sampled_log_probs,
)
from flashrl.errors import NonFiniteError, RolloutError, ShapeError

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
VALUES = [[-0.5, -1.0, -0.1], [-2.0, 0.0, 7.0]]


@pytest.mark.parametrize("make", [lambda v: v, torch.tensor, lambda v: torch.tensor(v).bfloat16()])
def test_good_values_pass_and_padding_is_cleared(make: Any) -> None:
    """A certain token's 0.0 among others is fine; what stands outside the mask is not read."""
    checked = check_rollout_log_probs(make(VALUES), response_mask=MASK)
    assert checked.dtype == torch.float32
    torch.testing.assert_close(checked, torch.tensor(VALUES) * MASK, atol=1e-3, rtol=0)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -9999.0, None])
def test_anything_may_stand_outside_the_mask(junk: float | None) -> None:
    values = [VALUES[0], [-2.0, -1.0, junk]]
    assert check_rollout_log_probs(values, response_mask=MASK)[1].tolist() == [-2.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, NonFiniteError, r"rollout_log_probs\[0, 1\] is nan .*missing"),
        (math.nan, NonFiniteError, r"rollout_log_probs\[0, 1\] is nan"),
        (-math.inf, NonFiniteError, r"rollout_log_probs\[0, 1\] is -inf"),
        (math.inf, NonFiniteError, r"rollout_log_probs\[0, 1\] is inf"),
        (0.25, RolloutError, r"rollout_log_probs\[0, 1\] is 0.25; .* at most 0"),
        (-9999.0, RolloutError, r"rollout_log_probs\[0, 1\] is -9999.0; .* a stand-in"),
        ("-0.5", RolloutError, "not a number"),
    ],
)
def test_a_value_that_is_no_log_prob_is_an_error(
    value: Any, error: type[Exception], message: str
) -> None:
    """vime#70, and SkyRL's -9999: what is missing is an error, whatever stands in for it."""
    with pytest.raises(error, match=message):
        check_rollout_log_probs([[-0.5, value, -0.1], VALUES[1]], response_mask=MASK)


def test_a_response_filled_with_zeros_is_an_error() -> None:
    """vime#70: missing log-probs are never 0.0; a certain policy has to say that it is one."""
    filled = torch.tensor([[-0.5, -1.0, -0.1], [0.0, 0.0, -3.0]])
    with pytest.raises(RolloutError, match=r"rollout_log_probs\[1\] is 0.0 at every"):
        check_rollout_log_probs(filled, response_mask=MASK)
    checked = check_rollout_log_probs(filled, response_mask=MASK, allow_zeros=True)
    assert checked[1].tolist() == [0.0, 0.0, 0.0]


def test_a_response_without_a_sampled_token_is_not_filled_with_zeros() -> None:
    nothing = torch.zeros(2, 3)
    assert torch.equal(check_rollout_log_probs(nothing, response_mask=nothing), nothing)


def test_rounding_above_one_is_not_an_error() -> None:
    """log(softmax) in float32 reports up to 1.2e-7 for a certain token."""
    checked = check_rollout_log_probs([[1.2e-7, -1.0]], response_mask=torch.ones(1, 2))
    assert checked.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([VALUES[0], VALUES[1][:2]], r"rollout_log_probs\[1\] has 2 values, response_mask\[1\] 3"),
        ([VALUES[0]], "rollout_log_probs has 1 sequences, response_mask 2"),
        (VALUES[0], "not made of rows"),
        (torch.tensor(VALUES)[:, :2], r"shape \(2, 2\), response_mask \(2, 3\)"),
        (torch.tensor(VALUES)[:1], r"shape \(1, 3\), response_mask \(2, 3\)"),
    ],
)
def test_a_length_mismatch_is_an_error(values: Any, message: str) -> None:
    """vime#70: values are neither padded nor cut to fit."""
    with pytest.raises(ShapeError, match=message):
        check_rollout_log_probs(values, response_mask=MASK)


def test_no_log_probs_at_all_is_an_error() -> None:
    with pytest.raises(RolloutError, match="the engine reported no log-probabilities"):
        check_rollout_log_probs(None, response_mask=MASK)


@pytest.mark.parametrize("wrap", [float, lambda v: SimpleNamespace(logprob=v, rank=4)])
def test_the_sampled_token_is_picked_by_its_id(wrap: Any) -> None:
    """TRL#3867, vllm#26014: {13: -0.70, 382: -4.20}, sampled 382 → -4.20, in either order."""
    listed = [{13: wrap(-0.70), 382: wrap(-4.20)}, {382: wrap(-4.20), 13: wrap(-0.70)}]
    assert pick_sampled_log_probs(listed, [382, 382]) == [-4.20, -4.20]
    assert pick_sampled_log_probs(listed, torch.tensor([13, 382])) == [-0.70, -4.20]


@pytest.mark.parametrize("listed", [{13: -0.70}, {}, None, {382: None}])
def test_a_sampled_token_that_is_not_listed_is_an_error(listed: Any) -> None:
    with pytest.raises(RolloutError, match="position 1: token 382 was sampled"):
        pick_sampled_log_probs([{5: -0.1}, listed], [5, 382])


def test_a_position_too_few_is_an_error() -> None:
    with pytest.raises(ShapeError, match="1 positions with log-probabilities for 2 tokens"):
        pick_sampled_log_probs([{5: -0.1}], [5, 6])


def test_ragged_responses_are_right_padded() -> None:
    assembled = assemble_rollout(
        [[5, 6, 7], [8]], [[-0.1, -0.2, -0.3], [-0.4]], pad_token_id=99, version=12
    )
    assert assembled.response_ids.tolist() == [[5, 6, 7], [8, 99, 99]]
    assert assembled.response_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    torch.testing.assert_close(
        assembled.rollout_log_probs, torch.tensor([[-0.1, -0.2, -0.3], [-0.4, 0.0, 0.0]])
    )
    assert assembled.log_mass is None
    assert assembled.version == 12


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [lambda v: v, torch.tensor])
def test_padding_on_either_side_gives_the_same_columns(side: str, make: Any) -> None:
    """TRL#6191: ragged batch, left and right padding, columns aligned."""
    responses = [[5, 6, 7], [8], [9, 10]]
    log_probs = [[-0.5, -0.6, -0.7], [-0.8], [-0.9, -1.0]]

    def pad(rows: list[list[Any]], fill: Any) -> list[list[Any]]:
        blank = [[fill] * (4 - len(row)) for row in rows]
        return [b + r if side == "left" else r + b for r, b in zip(rows, blank, strict=True)]

    assembled = assemble_rollout(
        make(pad(responses, 0)),
        make(pad(log_probs, -1.0)),
        padding_mask=make(pad([[1] * len(row) for row in responses], 0)),
    )
    expected = assemble_rollout(responses, log_probs)
    assert torch.equal(assembled.response_ids, expected.response_ids)
    assert torch.equal(assembled.response_mask, expected.response_mask)
    assert torch.equal(assembled.rollout_log_probs, expected.rollout_log_probs)


def test_a_token_the_harness_appended_is_masked() -> None:
    """SkyRL#570: an end-of-sequence that the model did not generate has no log-prob."""
    assembled = assemble_rollout(
        [[5, 6, 2], [7, 8]],
        [[-0.1, -0.2, None], [-0.3, 0.0]],
        source_mask=[[1, 1, 0], [1, 0]],
        log_mass=[[-0.01, -0.02, None], [-0.03, None]],
    )
    assert assembled.response_ids.tolist() == [[5, 6, 2], [7, 8, 0]]
    assert assembled.response_mask.tolist() == [[1, 1, 0], [1, 0, 0]]
    torch.testing.assert_close(
        assembled.rollout_log_probs, torch.tensor([[-0.1, -0.2, 0.0], [-0.3, 0.0, 0.0]])
    )
    torch.testing.assert_close(
        assembled.log_mass, torch.tensor([[-0.01, -0.02, 0.0], [-0.03, 0.0, 0.0]])
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rollout_log_probs": [[-0.1], [-0.3]]}, ShapeError, r"\[0\] has 1 values, response_ids"),
        ({"rollout_log_probs": [[-0.1, -0.2]]}, ShapeError, "has 1 sequences, response_ids 2"),
        ({"source_mask": [[1, 1], [1, 1]]}, ShapeError, r"source_mask\[1\] has 2 values"),
        ({"padding_mask": [[1], [1]]}, ShapeError, r"padding_mask\[0\] has 1 values"),
        ({"log_mass": [[0.0, 0.0], []]}, ShapeError, r"log_mass\[1\] has 0 values"),
        ({"log_mass": [[0.0, None], [0.0]]}, NonFiniteError, r"log_mass\[0, 1\] is nan"),
        ({"rollout_log_probs": [[-0.1, None], [-0.3]]}, NonFiniteError, r"\[0, 1\] is nan"),
        ({"rollout_log_probs": [[0.0, 0.0], [-0.3]]}, RolloutError, "filled in"),
        ({"response_ids": [[5, None], [7]]}, RolloutError, "response_ids holds something"),
    ],
)
def test_what_does_not_line_up_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"response_ids": [[5, 6], [7]], "rollout_log_probs": [[-0.1, -0.2], [-0.3]]}
    with pytest.raises(error, match=message):
        assemble_rollout(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("responses", "shape"), [([], (0, 0)), ([[], []], (2, 0)), ([[], [1]], (2, 1))]
)
def test_empty_responses_are_no_special_case(
    responses: list[list[int]], shape: tuple[int, int]
) -> None:
    log_probs = [[-1.0] * len(row) for row in responses]
    assert assemble_rollout(responses, log_probs).response_ids.shape == shape


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**40), st.floats(-50, -0.125, width=32)), max_size=6),
        max_size=5,
    )
)
def test_law_assembling_loses_nothing(sequences: list[list[tuple[int, float]]]) -> None:
    """What the mask selects is what went in, in order."""
    ids, log_probs = ([[pair[i] for pair in row] for row in sequences] for i in (0, 1))
    assembled = assemble_rollout(ids, log_probs)
    mask = assembled.response_mask != 0
    assert assembled.response_ids[mask].tolist() == [i for row in ids for i in row]
    assert assembled.rollout_log_probs[mask].tolist() == [v for row in log_probs for v in row]
    assert mask.sum(-1).tolist() == [len(row) for row in ids]
