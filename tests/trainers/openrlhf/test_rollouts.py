"""Responses: what the engine did not report is no action, on vLLM's own classes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from flashrl.errors import RolloutError
from flashrl.trainers import guards
from flashrl.trainers.openrlhf.rollouts import guarded, mask_missing


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_warned", set())


@pytest.fixture(scope="module")
def completion(require_packages: Any) -> Any:
    """Makes vLLM's completion of tokens 10, 11, ... with these log-probabilities."""
    require_packages("vllm")
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    def completion(values: list[float | None] | None, num_tokens: int | None = None) -> Any:
        reported = values and [
            {} if value is None else {10 + i: Logprob(value), 7: Logprob(-9.0)}
            for i, value in enumerate(values)
        ]
        length = len(values or ()) if num_tokens is None else num_tokens
        return CompletionOutput(
            index=0,
            text="",
            token_ids=list(range(10, 10 + length)),
            cumulative_logprob=None,
            logprobs=reported,
        )

    return completion


def test_a_gap_is_cut_out_of_the_actions(completion: Any) -> None:
    """vime#70: a missing log-probability is never 0.0."""
    response = {"action_ranges": [(4, 9)]}
    found = mask_missing(response, [completion([-1.0, None, -0.5, math.nan, 0.0])])
    assert found == 2
    assert response["action_ranges"] == [(4, 5), (6, 7), (8, 9)]


def test_each_turn_has_its_own_range(completion: Any) -> None:
    response = {"action_ranges": [(2, 4), (7, 9)]}
    turns = [completion([-1.0, -1.0]), completion([-math.inf, -1.0])]
    assert mask_missing(response, turns) == 1
    assert response["action_ranges"] == [(2, 4), (8, 9)]


def test_a_good_response_stays_as_it_is(completion: Any) -> None:
    ranges = [(0, 2)]
    response = {"action_ranges": ranges}
    assert mask_missing(response, [completion([-1.0, -2.0])]) == 0
    assert response["action_ranges"] is ranges


def test_what_cannot_be_masked_is_an_error(completion: Any) -> None:
    with pytest.raises(RolloutError, match="2 tokens came with no log-probabilities"):
        mask_missing({"action_ranges": [(0, 2)]}, [completion(None, num_tokens=2)])
    with pytest.raises(RolloutError, match="3 tokens came with 2 log-probabilities"):
        mask_missing({"action_ranges": [(0, 3)]}, [completion([-1.0, -1.0], num_tokens=3)])
    with pytest.raises(RolloutError, match="none of the 2 log-probabilities"):
        mask_missing({"action_ranges": [(0, 2)]}, [completion([None, math.nan])])


def test_quantized_rollouts_without_log_probs_are_warned_of_where_they_are_generated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    async def execute(self: Any, *, sampling_params: Any, llm_engine: Any) -> dict[str, Any]:
        return {"action_ranges": []}

    monkeypatch.setenv("FLASHRL_CONFIG", "int8")
    run = guarded(execute)(
        None,
        sampling_params=SimpleNamespace(logprobs=None),
        llm_engine=SimpleNamespace(llm=None),
    )
    assert asyncio.run(run) == {"action_ranges": []}
    assert "turn it on with --algo.advantage.is_correction_level token" in caplog.text
