"""The log-probabilities are those of the distribution sampled, held against Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashrl
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import UnsupportedError
from flashrl.session import Session
from flashrl.testing import Checkpoint

from .ways import PROMPTS

Checkpoints = tuple[Checkpoint, Checkpoint]


@pytest.fixture(scope="module")
def hugging_face(wide_checkpoints: Checkpoints) -> tuple[Any, list[tuple[str, Tensor]]]:
    """The embedded engine, quantized alike, in bf16; and the weights that it holds.

    An eighth of A's: random weights of A's size amplify the rounding of bf16 past any tolerance
    (0.12 nats at a third, 0.02 at an eighth, between bf16 and fp32 of the same 8-bit model).
    """
    transformers = pytest.importorskip("transformers")
    calm = [(n, t / 8 if t.ndim == 2 else t) for n, t in wide_checkpoints[0].named_tensors()]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        wide_checkpoints[0].path, dtype=torch.bfloat16
    )
    flashrl.attach(model, "int8").update_weights(calm)
    return model, calm


@pytest.fixture
def calm_session(session: Session, hugging_face: tuple[Any, Any]) -> Session:
    """The engine, holding what the embedded engine holds."""
    session.update_weights(hugging_face[1])
    return session


def logits_of(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Logits before each token of a response, (response_length, vocab)."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt + response])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def responses_of(rollout: Any) -> list[tuple[list[int], Tensor]]:
    """Tokens and log-probabilities of each response, without padding."""
    return [
        (ids[mask.bool()].tolist(), log_probs[mask.bool()])
        for ids, mask, log_probs in zip(
            rollout.response_ids, rollout.response_mask, rollout.rollout_log_probs, strict=True
        )
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probs_agree_with_hugging_face(
    calm_session: Session, hugging_face: Any, temperature: float
) -> None:
    """TRL#4159 and its kin: tempered once, and by division of the logits."""
    rollout = calm_session.generate(PROMPTS, SamplingParams(temperature=temperature, max_tokens=24))
    for prompt, (response, log_probs) in zip(PROMPTS, responses_of(rollout), strict=True):
        logits = logits_of(hugging_face[0], prompt, response) / (temperature or 1.0)
        expected = logits.log_softmax(-1)[torch.arange(len(response)), response]
        torch.testing.assert_close(log_probs, expected, atol=0.02, rtol=0)


def test_penalties_and_bias_are_part_of_the_distribution(
    calm_session: Session, hugging_face: Any
) -> None:
    """The original's patched sampler ignored them.

    With its overlapped schedule SGLang counts a token one step late, and the prompt's last token
    in its place; what it reports is the distribution that it really sampled.
    """
    params = SamplingParams(
        max_tokens=24,
        temperature=0.9,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={7: 3.0, 300: -2.0},
    )

    def penalized(row: Tensor, seen: list[int], token: int) -> float:
        row = row.clone()
        row[7] += 3.0
        row[300] -= 2.0
        for known in set(seen):
            row[known] -= 0.7 + 0.4 * seen.count(known)
        return (row / 0.9).log_softmax(-1)[token].item()

    rollout = calm_session.generate(PROMPTS, params)
    for prompt, (response, log_probs) in zip(PROMPTS, responses_of(rollout), strict=True):
        logits = logits_of(hugging_face[0], prompt, response)
        for position, token in enumerate(response):
            late = [*prompt[-1:], *response[: position - 1]] if position else []
            expected = [
                penalized(logits[position], seen, token) for seen in (response[:position], late)
            ]
            assert min(abs(log_probs[position].item() - e) for e in expected) < 0.03


@pytest.mark.parametrize(
    "cut", [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.4}, {"top_k": 8, "top_p": 0.8}]
)
def test_truncated_log_probs_are_renormalised(
    calm_session: Session, hugging_face: Any, cut: dict[str, Any]
) -> None:
    """Exact, or refused with a reason."""
    params = SamplingParams(max_tokens=16, temperature=1.3, **cut)
    if not set(cut) <= calm_session.capabilities.exact_log_probs:
        with pytest.raises(UnsupportedError, match="does not report exact log-probabilities"):
            calm_session.generate(PROMPTS, params)
        return
    rollout = calm_session.generate(PROMPTS, params)
    assert rollout.log_mass is not None
    assert (rollout.log_mass < 0).float().mean() > 0.9
    for row, (prompt, (response, log_probs)) in enumerate(
        zip(PROMPTS, responses_of(rollout), strict=True)
    ):
        probs = (logits_of(hugging_face[0], prompt, response) / 1.3).softmax(-1)
        ordered = probs.sort(descending=True).values
        kept = torch.arange(ordered.shape[1]) < cut.get("top_k", ordered.shape[1])
        kept = kept & (ordered.cumsum(1) - ordered <= cut.get("top_p", 1.0))
        kept &= ordered >= cut.get("min_p", 0.0) * ordered[:, :1]
        log_mass = (ordered * kept).sum(1).log()
        sampled = probs[torch.arange(len(response)), response].log()
        torch.testing.assert_close(log_probs, sampled - log_mass, atol=0.05, rtol=0)
        torch.testing.assert_close(
            rollout.log_mass[row, : len(response)], log_mass, atol=0.05, rtol=0
        )
