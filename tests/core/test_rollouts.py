"""Sampling parameters and rollouts refuse what makes no sense, and say all of it at once."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.errors import ConfigError, FlashRLError, ShapeError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", "0.7"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("logit_bias", {"382": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: -math.inf}),
        ("logit_bias", {3: None}),
        ("logit_bias", [3]),
        ("logit_bias", None),
        ("stop_token_ids", ("</s>",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 2),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
    ],
)
def test_a_value_outside_its_range_is_named(field: str, value: Any) -> None:
    """The error is ours and a ValueError, and says what was given and what is allowed."""
    with pytest.raises(ConfigError, match=rf"{field}.* is .*; allowed: ") as raised:
        SamplingParams(**{field: value})
    assert isinstance(raised.value, FlashRLError)
    assert isinstance(raised.value, ValueError)


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(temperature=-1, top_p=2, logit_bias={"a": 1, 5: math.nan}, seed=-3)
    message = str(raised.value)
    for fault in (
        "temperature is -1",
        "top_p is 2",
        "logit_bias['a']",
        "logit_bias[5]",
        "seed is -3",
    ):
        assert fault in message


def test_values_at_the_end_of_their_range_are_fine() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1, seed=0, logit_bias={0: -100})
    SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), stop_token_ids=[2, np.int64(3)])


def test_parameters_do_not_follow_the_callers_dict() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}


def test_parameters_can_be_sent_to_a_worker() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop_token_ids=[2])
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301


@pytest.mark.parametrize(
    ("params", "greedy", "truncates", "penalizes"),
    [
        (SamplingParams(), False, False, False),
        (SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1), True, False, False),
        (SamplingParams(top_k=1), False, True, False),
        (SamplingParams(top_p=0.999), False, True, False),
        (SamplingParams(min_p=0.001), False, True, False),
        (SamplingParams(repetition_penalty=0.9), False, False, True),
        (SamplingParams(presence_penalty=-0.1), False, False, True),
        (SamplingParams(temperature=0, frequency_penalty=0.1), True, False, True),
    ],
)
def test_what_the_parameters_do(
    params: SamplingParams, greedy: bool, truncates: bool, penalizes: bool
) -> None:
    assert (params.greedy, params.truncates, params.penalizes) == (greedy, truncates, penalizes)


def rollout(**changes: Any) -> Rollout:
    fields = {
        "response_ids": torch.tensor([[4, 5]]),
        "response_mask": torch.tensor([[1, 1]]),
        "rollout_log_probs": torch.tensor([[-0.1, -0.2]]),
    }
    return Rollout(**{**fields, **changes})


def test_a_rollout_without_log_mass_is_fine() -> None:
    assert rollout().log_mass is None
    assert rollout(log_mass=torch.zeros(1, 2), version=3).version == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": torch.tensor([4, 5])}, r"response_ids has shape \(2,\)"),
        ({"response_ids": torch.tensor([[4.0, 5.0]])}, "dtype torch.float32; allowed: integers"),
        ({"response_mask": torch.ones(2, 1)}, r"response_mask has shape \(2, 1\)"),
        ({"rollout_log_probs": torch.zeros(1, 3)}, r"rollout_log_probs has shape \(1, 3\)"),
        ({"rollout_log_probs": torch.tensor([[0, 0]])}, "rollout_log_probs has dtype torch.int64"),
        ({"log_mass": torch.zeros(1)}, r"log_mass has shape \(1,\)"),
        ({"response_mask": torch.ones(1, 2, device="meta")}, "on meta, response_ids"),
    ],
)
def test_a_rollout_whose_parts_disagree_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        rollout(**changes)
