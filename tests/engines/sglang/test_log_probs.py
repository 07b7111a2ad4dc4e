"""Requests and answers of SGLang, without an engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashrl.core.rollouts import SamplingParams
from flashrl.engines.sglang.log_probs import (
    build_request,
    build_rollout,
    check_exact,
    check_prompts,
    needs_support,
)
from flashrl.errors import RolloutError, ShapeError, UnsupportedError

ALL = frozenset({"temperature", "top_k", "top_p", "min_p"})


def answer(ids: list[int], log_probs: list[float | None], sampling: Any = None) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "output_token_logprobs": [(p, i, None) for p, i in zip(log_probs, ids, strict=False)]
    }
    if sampling is not None:
        meta["output_token_sampling_logprobs"] = sampling
    return {"output_ids": ids, "meta_info": meta}


def test_the_tempered_log_prob_is_taken_as_it_is() -> None:
    """TRL#4159: logits [2, 1, 0] at T = 0.5; dividing -0.4076 again would give -0.815."""
    rollout = build_rollout(
        [answer([0, 1], [-0.1429, -2.1429])], SamplingParams(temperature=0.5), version=3
    )
    assert rollout.rollout_log_probs.tolist()[0] == pytest.approx([-0.1429, -2.1429])
    assert rollout.log_mass is not None
    assert not rollout.log_mass.any()
    assert rollout.version == 3


def test_truncation_renormalises_and_says_what_was_cut() -> None:
    """Probabilities 0.5, 0.3, 0.2 under top-k 2: the first becomes 0.625, and 0.8 survived."""
    given = answer([0], [math.log(0.5)], sampling=[math.log(0.625)])
    rollout = build_rollout([given], SamplingParams(top_k=2), version=None)
    assert rollout.rollout_log_probs.item() == pytest.approx(math.log(0.625))
    assert rollout.log_mass is not None
    assert rollout.log_mass.item() == pytest.approx(math.log(0.8))


def test_one_candidate_has_probability_one() -> None:
    rollout = build_rollout([answer([4], [-1.5])], SamplingParams(top_k=1), version=None)
    assert rollout.rollout_log_probs.item() == 0.0
    assert rollout.log_mass is not None
    assert rollout.log_mass.item() == pytest.approx(-1.5)


def test_responses_of_different_length_are_aligned() -> None:
    """TRL#6191."""
    rollout = build_rollout(
        [answer([7], [-1.0]), answer([8, 9, 2], [-0.1, -0.2, -0.3])],
        SamplingParams(),
        version=None,
    )
    assert rollout.response_ids.tolist() == [[7, 0, 0], [8, 9, 2]]
    assert rollout.response_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    torch.testing.assert_close(
        rollout.rollout_log_probs, torch.tensor([[-1.0, 0, 0], [-0.1, -0.2, -0.3]])
    )


@pytest.mark.parametrize("log_probs", [[-0.5], [-0.5, None], []])
def test_a_missing_log_prob_is_never_zero(log_probs: list[float | None]) -> None:
    """vime#70."""
    with pytest.raises(RolloutError, match="for 2 tokens"):
        build_rollout([answer([1, 2], log_probs)], SamplingParams(), version=None)


def test_a_missing_support_is_an_error() -> None:
    with pytest.raises(RolloutError, match="0 log-probabilities for 1 tokens"):
        build_rollout([answer([1], [-0.5])], SamplingParams(top_p=0.9), version=None)


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(top_k=5), True),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(min_p=0.1), True),
        (SamplingParams(top_k=1), False),
        (SamplingParams(temperature=0.0, top_p=0.5), False),
    ],
)
def test_the_support_is_asked_for_where_tokens_can_be_cut(
    params: SamplingParams, needed: bool
) -> None:
    assert needs_support(params) is needed


def test_a_request_says_everything_and_leaves_nothing_to_defaults() -> None:
    """A checkpoint's generation_config must not change what is sampled."""
    params = SamplingParams(
        max_tokens=9, temperature=0.7, top_p=0.9, logit_bias={5: 1.5}, stop_token_ids=(2,), seed=1
    )
    assert build_request(params, vocab=320) == {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_k": 320,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {"5": 1.5},
        "stop_token_ids": [2],
        "sampling_seed": 1,
    }
    assert build_request(SamplingParams(), vocab=320)["top_k"] == -1


@pytest.mark.parametrize(
    ("params", "culprit"),
    [
        (SamplingParams(top_k=5), "top_k"),
        (SamplingParams(top_p=0.9), "top_p"),
        (SamplingParams(min_p=0.1), "min_p"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_a_reason(
    params: SamplingParams, culprit: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"under {culprit}.*exact are: temperature"):
        check_exact(params, frozenset({"temperature"}), most=0, vocab=320)


def test_tempered_sampling_is_refused_where_raw_log_probs_are_reported() -> None:
    with pytest.raises(UnsupportedError, match="under temperature"):
        check_exact(SamplingParams(temperature=0.5), frozenset(), most=0, vocab=320)
    check_exact(SamplingParams(), frozenset(), most=0, vocab=320)
    check_exact(SamplingParams(temperature=0.0), frozenset(), most=0, vocab=320)


def test_a_support_that_is_too_large_is_refused_with_a_way_out() -> None:
    check_exact(SamplingParams(top_p=0.9, top_k=64), ALL, most=64, vocab=320)
    with pytest.raises(UnsupportedError, match="sampling_mask_max_tokens=320"):
        check_exact(SamplingParams(top_p=0.9), ALL, most=64, vocab=320)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_empty_prompts_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ShapeError, match="no empty one"):
        check_prompts(prompts)
