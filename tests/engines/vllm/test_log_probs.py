"""The log-probabilities that a vLLM engine reports are those of the distribution it sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.log_probs.penalties import TokenHistory
from flashrl.core.log_probs.sampling import process_logits
from flashrl.core.rollouts import SamplingParams
from flashrl.engines.vllm.log_probs import extract_rollout, native_sampling_params
from flashrl.errors import RolloutError, UnsupportedError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .conftest import worker_of

PROMPT = [5, 9, 17, 4, 5, 9]

CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=6),
    "temperature": SamplingParams(temperature=0.5, max_tokens=6),
    "top_k": SamplingParams(top_k=7, max_tokens=6),
    "top_p": SamplingParams(top_p=0.7, max_tokens=6),
    "min_p": SamplingParams(min_p=0.2, temperature=1.5, max_tokens=6),
    "repetition": SamplingParams(repetition_penalty=1.4, max_tokens=6),
    "presence": SamplingParams(presence_penalty=0.8, frequency_penalty=0.3, max_tokens=12),
    "logit_bias": SamplingParams(logit_bias={7: 4.0, 9: -100.0}, max_tokens=6),
    "greedy_penalties": SamplingParams(temperature=0.0, repetition_penalty=2.0, max_tokens=8),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={3: 2.0},
        max_tokens=12,
    ),
}


@pytest.fixture(scope="module")
def session(engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]) -> Session:
    arguments = flashrl.launch_args("vllm", "int8")
    return flashrl.attach(engine(checkpoint(seed=0).path, **arguments), "int8")


@contextmanager
def recorded_logits(
    session: Session, replacement: torch.Tensor | None = None
) -> Iterator[list[torch.Tensor]]:
    """What the model hands to vLLM's sampler at each step, or a stand-in for it."""
    model = worker_of(session.engine._engine).get_model()
    compute, steps = model.compute_logits, []

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if replacement is not None:
            logits = replacement.expand_as(logits).clone()
        steps.append(logits.float().clone())
        return logits

    model.compute_logits = compute_logits
    try:
        yield steps
    finally:
        del model.compute_logits


@pytest.mark.parametrize("name", CASES)
def test_they_agree_with_the_reference_on_the_engines_own_logits(
    session: Session, name: str
) -> None:
    params = CASES[name]
    for seed in range(4):
        with recorded_logits(session) as steps:
            rollout = session.generate(
                [PROMPT], SamplingParams(**{**_fields(params), "seed": seed})
            )
        length = int(rollout.response_mask.sum())
        assert len(steps) == length
        history = TokenHistory.start(torch.tensor([PROMPT]), vocab_size=steps[0].shape[1])
        for step, token in enumerate(rollout.response_ids[0, :length]):
            distribution = process_logits(steps[step], params, history=history).log_softmax(-1)
            expected = distribution[0, token]
            assert torch.isfinite(expected), "the sampled token lies in the support"
            assert rollout.rollout_log_probs[0, step] == pytest.approx(float(expected), abs=1e-4)
            history.append(token[None])


def test_a_halved_temperature_by_hand(session: Session) -> None:
    """TRL#4159, prime-rl#697, verl#4162, OpenRLHF#853: raw is -0.4076, divided by T -0.815."""
    logits = torch.full((session.engine._model_config().get_vocab_size(),), -1e9)
    logits[:3] = torch.tensor([2.0, 1.0, 0.0])
    by_hand = {0: -0.1429, 1: -2.1429, 2: -4.1429}
    params = SamplingParams(temperature=0.5, max_tokens=1, seed=0)
    with recorded_logits(session, logits):
        rollout = session.generate([PROMPT] * 64, params)
    seen = rollout.response_ids[:, 0].tolist()
    assert 0 in seen
    assert set(seen) <= set(by_hand)
    for token, value in zip(seen, rollout.rollout_log_probs[:, 0].tolist(), strict=True):
        assert value == pytest.approx(by_hand[token], abs=1e-4)


def test_several_samples_of_a_prompt_come_flat(session: Session) -> None:
    from vllm.logprobs import FlatLogprobs

    engine = session.engine._engine
    native = native_sampling_params(SamplingParams(max_tokens=5, seed=1), n=3)
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * 2, native, use_tqdm=False)
    assert isinstance(outputs[0].outputs[0].logprobs, FlatLogprobs)
    rollout = extract_rollout(outputs, version=9)
    assert rollout.response_ids.shape[0] == 6
    assert rollout.version == 9
    for row, completion in enumerate(c for output in outputs for c in output.outputs):
        length = len(completion.token_ids)
        assert rollout.response_mask[row].sum() == length
        reported = reported_by_dict(completion)
        assert rollout.rollout_log_probs[row, :length].tolist() == pytest.approx(reported)


def test_the_sampled_token_is_found_among_candidates(session: Session) -> None:
    """TRL#3867, vllm#26014: the first candidate is not always the sampled one."""
    from vllm import SamplingParams as Native

    engine = session.engine._engine
    prompts = [{"prompt_token_ids": PROMPT}]
    outputs = engine.generate(
        prompts, Native(max_tokens=8, logprobs=5, seed=3, temperature=1.5), use_tqdm=False
    )
    completion = outputs[0].outputs[0]
    rollout = extract_rollout(outputs)
    expected = reported_by_dict(completion)
    assert rollout.rollout_log_probs[0].tolist() == pytest.approx(expected)


def test_missing_log_probs_are_an_error(session: Session) -> None:
    """vime#70: never 0.0."""
    from vllm import SamplingParams as Native

    outputs = session.engine._engine.generate(
        [{"prompt_token_ids": PROMPT}], Native(max_tokens=2), use_tqdm=False
    )
    with pytest.raises(RolloutError, match="logprobs=0"):
        extract_rollout(outputs)


def test_what_was_cut_off_is_not_claimed_to_be_known(session: Session) -> None:
    whole = session.generate([PROMPT], SamplingParams(max_tokens=3))
    assert whole.log_mass is not None
    assert not whole.log_mass.any()
    assert session.generate([PROMPT], SamplingParams(max_tokens=3, top_p=0.5)).log_mass is None


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.005), SamplingParams(logit_bias={3: 150.0})],
    ids=["temperature", "logit_bias"],
)
def test_what_vllm_would_quietly_change_is_refused(
    session: Session, params: SamplingParams
) -> None:
    with pytest.raises(UnsupportedError, match="vLLM"):
        session.generate([PROMPT], params)


def test_attaching_turns_the_processed_mode_on_and_detaching_off(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    raw = engine(checkpoint(seed=0).path)
    assert worker_of(raw).model_runner.sampler.logprobs_mode == "raw_logprobs"
    with flashrl.attach(raw, "int8") as session:
        with recorded_logits(session) as steps:
            rollout = session.generate([PROMPT], SamplingParams(temperature=0.5, max_tokens=1))
        token = int(rollout.response_ids[0, 0])
        expected = (steps[0] / 0.5).log_softmax(-1)[0, token]
        assert rollout.rollout_log_probs[0, 0] == pytest.approx(float(expected), abs=1e-4)
    assert worker_of(raw).model_runner.sampler.logprobs_mode == "raw_logprobs"


def test_equal_prompts_with_a_seed_do_not_get_equal_draws(session: Session) -> None:
    params = SamplingParams(max_tokens=6, seed=5, temperature=1.5)
    first, again = (session.generate([PROMPT] * 8, params) for _ in range(2))
    assert torch.equal(first.response_ids, again.response_ids)
    assert len({tuple(row) for row in first.response_ids.tolist()}) > 1


def reported_by_dict(completion: Any) -> list[float]:
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return [step[token].logprob for step, token in pairs]


def _fields(params: SamplingParams) -> dict[str, Any]:
    import attrs

    return attrs.asdict(params, recurse=False)
