"""Log-probabilities of whole responses: values, gradients, memory, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flashrl.core.log_probs import compute_log_probs, compute_log_probs_from_hidden
from flashrl.core.log_probs.penalties import TokenHistory
from flashrl.core.log_probs.sampling import process_logits, sample
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import ConfigError, NonFiniteError, RolloutError, ShapeError

VOCAB = 30
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={4: 1.0},
)


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that is newly made, in elements; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_iter(args) if torch.is_tensor(t)}
        for tensor in filter(torch.is_tensor, tree_iter(result)):
            if tensor.untyped_storage().data_ptr() not in given:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_temperature_divides_the_logits() -> None:
    """TRL#4159, prime-rl#697, verl#4162, OpenRLHF#853: raw is -0.4076, and -0.8152 is wrong."""
    logits, token = torch.tensor([2.0, 1.0, 0.0]), torch.tensor(0)
    raw = compute_log_probs(logits, token).log_probs
    cold = compute_log_probs(logits, token, params=SamplingParams(temperature=0.5)).log_probs
    assert raw.item() == pytest.approx(-0.4076, abs=5e-5)
    assert cold.item() == pytest.approx(-0.1429, abs=5e-5)


def test_greedy_is_untempered() -> None:
    """At temperature 0 vLLM reports the log-softmax of the logits as they are."""
    logits, token = torch.tensor([2.0, 1.0, 0.0]), torch.tensor(1)
    greedy = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    scored = compute_log_probs(logits, token, params=greedy)
    assert scored.log_probs.item() == pytest.approx(-1.4076, abs=5e-5)
    assert scored.log_mass == 0


def test_a_filtered_token_has_no_probability() -> None:
    """Top-k 2 of [3, 2, 1]: token 2 is -inf, the others share e/(1 + e) and 1/(1 + e)."""
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    scored = compute_log_probs(logits, torch.tensor([0, 1, 2]), params=SamplingParams(top_k=2))
    expected = [-math.log1p(math.exp(-1)), -math.log1p(math.exp(1)), -math.inf]
    assert scored.log_probs.tolist() == pytest.approx(expected)
    mass = (math.exp(3) + math.exp(2)) / (math.exp(3) + math.exp(2) + math.exp(1))
    assert scored.log_mass.tolist() == pytest.approx([math.log(mass)] * 3)


def test_teacher_forcing_equals_the_rollout() -> None:
    """Scoring a response at once gives what each step of sampling it reported."""
    steps, batch = 12, 5
    logits = torch.randn(batch, steps, VOCAB) * 2
    prompts = torch.randint(0, VOCAB, (batch, 6))
    prompt_mask = torch.arange(6) >= torch.tensor([[0], [1], [2], [3], [6]])
    history = TokenHistory.start(prompts, vocab_size=VOCAB, prompt_mask=prompt_mask)
    generator = torch.Generator().manual_seed(3)
    draws = []
    for step in range(steps):
        draws.append(sample(logits[:, step], EVERYTHING, generator, history=history))
        history.append(draws[-1].token_ids)
    tokens, log_probs, log_mass = (torch.stack(parts, 1) for parts in zip(*draws, strict=True))
    scored = compute_log_probs(
        logits, tokens, params=EVERYTHING, prompt_ids=prompts, prompt_mask=prompt_mask, chunk_size=8
    )
    assert torch.equal(scored.log_probs, log_probs)
    assert torch.equal(scored.log_mass, log_mass)
    assert log_probs.isfinite().all()
    assert (log_mass < 0).any()


@given(st.integers(1, 40), st.booleans())
def test_law_the_chunk_size_does_not_matter(chunk_size: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 9, VOCAB, generator=generator)
    tokens = torch.randint(0, VOCAB, (3, 9), generator=generator)
    options: dict[str, Any] = {"params": EVERYTHING, "prompt_ids": tokens[:, :2]}
    if masked:
        options["response_mask"] = torch.tensor([[1, 0, 1] * 3, [0, 1, 1] * 3, [0] * 9])
    whole = compute_log_probs(logits, tokens, **options, chunk_size=1000)
    parts = compute_log_probs(logits, tokens, **options, chunk_size=chunk_size)
    assert torch.equal(whole.log_probs, parts.log_probs)
    assert torch.equal(whole.log_mass, parts.log_mass)


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (2, 3, 5)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    logits = torch.randn(*shape, VOCAB)
    tokens = torch.randint(0, VOCAB, shape)
    scored = compute_log_probs(logits, tokens, params=SamplingParams(top_p=0.99), chunk_size=4)
    expected = process_logits(logits, SamplingParams(top_p=0.99)).log_softmax(-1)
    assert scored.log_mass.shape == shape
    torch.testing.assert_close(scored.log_probs, expected.gather(-1, tokens[..., None])[..., 0])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_nothing_to_score(shape: tuple[int, ...]) -> None:
    nothing = torch.zeros(shape, dtype=torch.int64)
    assert compute_log_probs(torch.zeros(*shape, 4), nothing).log_probs.shape == shape


def test_shifted_views_need_no_copy() -> None:
    """A slice of the model's output, as trainers pass it, gives what a contiguous copy gives."""
    logits = torch.randn(3, 8, VOCAB)
    tokens = torch.randint(0, VOCAB, (3, 7))
    view = compute_log_probs(logits[:, :-1], tokens, chunk_size=14)
    assert torch.equal(view.log_probs, compute_log_probs(logits[:, :-1].clone(), tokens).log_probs)


def test_skipped_positions_may_hold_anything() -> None:
    """Flash-RL#19: mask 0 with any value, NaN or a token that is none, changes nothing."""
    logits = torch.randn(2, 4, VOCAB)
    tokens = torch.randint(0, VOCAB, (2, 4))
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    clean = logits.clone().requires_grad_()
    dirty = logits.masked_fill(mask[..., None] == 0, math.nan).requires_grad_()
    expected = compute_log_probs(clean, tokens, response_mask=mask).log_probs
    scored = compute_log_probs(
        dirty, tokens.masked_fill(mask == 0, -100), response_mask=mask
    ).log_probs
    assert torch.equal(scored, expected)
    assert (scored[0, 2:] == 0).all()
    expected.sum().backward()
    scored.sum().backward()
    assert torch.equal(dirty.grad, clean.grad)
    assert (dirty.grad[0, 2:] == 0).all()


def test_a_batch_that_is_all_masked_can_still_be_trained_on() -> None:
    """verl#3984: everything masked is loss 0 and gradient 0, not an error in backward."""
    logits = torch.randn(2, 3, VOCAB, requires_grad=True)
    params = SamplingParams(top_p=0.9, top_k=5, min_p=0.1)
    nothing = torch.zeros(2, 3)
    scored = compute_log_probs(logits, nothing.long(), params=params, response_mask=nothing)
    scored.log_probs.sum().backward()
    assert logits.grad.abs().sum() == 0


def test_tokens_of_the_harness_are_not_counted_as_said() -> None:
    """SkyRL#570: an appended token is masked, and raises no penalty either."""
    logits = torch.randn(1, 3, VOCAB)
    params = SamplingParams(frequency_penalty=1.0)
    mask = torch.tensor([[1, 0, 1]])
    scored = compute_log_probs(logits, torch.tensor([[5, 9, 9]]), params=params, response_mask=mask)
    alone = logits[0, 2].index_fill(0, torch.tensor([5]), logits[0, 2, 5].item() - 1.0)
    assert scored.log_probs[0, 2] == pytest.approx(alone.log_softmax(-1)[9].item(), abs=1e-6)


def test_gradient_equals_finite_differences() -> None:
    """In the logits, through every parameter, across chunks."""
    logits = torch.randn(2, 5, VOCAB, dtype=torch.float64, requires_grad=True)
    tokens = process_logits(logits.detach(), SamplingParams(temperature=0.0)).argmax(-1)
    params = SamplingParams(
        temperature=0.8,
        min_p=0.05,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
    )

    def score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_log_probs(
            logits, tokens, params=params, prompt_ids=tokens[:, :2], chunk_size=3
        )

    assert torch.autograd.gradcheck(score, logits)


def test_gradient_from_hidden_states_equals_finite_differences() -> None:
    """In the hidden states, the lm_head's weight and its bias, with some positions masked."""
    options: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight, bias = (torch.randn(*shape, **options) for shape in ((2, 4, 3), (6, 3), (6,)))
    tokens = torch.randint(0, 6, (2, 4))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])

    def score(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return compute_log_probs_from_hidden(
            hidden,
            weight,
            tokens,
            bias=bias,
            params=SamplingParams(temperature=0.7),
            response_mask=mask,
            chunk_size=3,
        ).log_probs

    assert torch.autograd.gradcheck(score, (hidden, weight, bias))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)])
def test_hidden_states_give_what_their_logits_give(params: SamplingParams) -> None:
    hidden, weight, bias = torch.randn(3, 10, 16), torch.randn(VOCAB, 16), torch.randn(VOCAB)
    tokens = torch.randint(0, VOCAB, (3, 10))
    direct = compute_log_probs(hidden @ weight.T + bias, tokens, params=params)
    fused = compute_log_probs_from_hidden(
        hidden, weight, tokens, bias=bias, params=params, chunk_size=4
    )
    torch.testing.assert_close(fused.log_probs, direct.log_probs)
    torch.testing.assert_close(fused.log_mass, direct.log_mass)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING])
def test_the_full_logits_never_exist(backward: bool, params: SamplingParams) -> None:
    """No tensor outgrows a chunk of logits or the weight, forward or backward."""
    vocab, chunk_size, rows = 2000, 16, 4 * 64
    hidden = torch.randn(4, 64, 8, requires_grad=backward)
    weight = torch.randn(vocab, 8, requires_grad=backward)
    tokens = torch.randint(0, vocab, (4, 64))
    with LargestTensor() as largest, torch.set_grad_enabled(backward):
        scored = compute_log_probs_from_hidden(
            hidden,
            weight,
            tokens,
            params=params,
            prompt_ids=tokens[:, :3],
            chunk_size=chunk_size,
        )
        if backward:
            (scored.log_probs.exp() + scored.log_mass).sum().backward()
    assert largest.num_elements <= chunk_size * vocab < rows * vocab / 10
    assert (weight.grad is not None) == backward


def test_nothing_of_the_logits_is_kept_for_the_backward_pass() -> None:
    """All chunks together would be the full logits again: they are computed anew instead."""
    vocab, rows, kept = 2000, 4 * 64, 0
    hidden, weight = torch.randn(4, 64, 8, requires_grad=True), torch.randn(vocab, 8)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_log_probs_from_hidden(
            hidden, weight, torch.zeros(4, 64, dtype=torch.int64), chunk_size=16
        )
    assert kept < rows * vocab / 10


def test_logits_are_raised_to_float32_a_chunk_at_a_time() -> None:
    """bf16 logits of a whole batch are never copied at once, a slice of the model's output too."""
    logits = torch.randn(4, 65, 500).bfloat16()[:, :-1]
    tokens = torch.randint(0, 500, (4, 64))
    with LargestTensor() as largest, torch.no_grad():
        scored = compute_log_probs(logits, tokens, params=SamplingParams(top_k=9), chunk_size=16)
    assert scored.log_probs.dtype == torch.float32
    assert largest.num_elements == 16 * 500


def test_an_fp32_lm_head_is_computed_in_float32() -> None:
    """bf16 hidden states and weight: the float64 product to 1e-5, where bf16 is off by 1e-3."""
    hidden, weight = torch.randn(2, 5, 64).bfloat16(), torch.randn(VOCAB, 64).bfloat16()
    tokens = torch.randint(0, VOCAB, (2, 5))
    exact = (
        (hidden.double() @ weight.double().T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    )
    low = compute_log_probs_from_hidden(hidden, weight, tokens).log_probs
    high = compute_log_probs_from_hidden(
        hidden, weight, tokens, lm_head_dtype=torch.float32
    ).log_probs
    assert (high - exact).abs().max() < 1e-4
    assert (low - exact).abs().max() > 1e-3


def test_an_fp32_lm_head_stays_fp32_under_autocast() -> None:
    hidden, weight = torch.randn(2, 5, 64), torch.randn(VOCAB, 64)
    tokens = torch.randint(0, VOCAB, (2, 5))
    plain = compute_log_probs_from_hidden(hidden, weight, tokens).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        high = compute_log_probs_from_hidden(
            hidden, weight, tokens, lm_head_dtype=torch.float32
        ).log_probs
        low = compute_log_probs_from_hidden(hidden, weight, tokens).log_probs
    assert torch.equal(high, plain)
    assert not torch.equal(low, plain)


def test_a_padded_vocabulary_is_cut_at_the_tokenizer() -> None:
    hidden, weight = torch.randn(2, 5, 8), torch.randn(VOCAB, 8)
    tokens = torch.tensor([[0, 1, 2, 3, 4], [19, 18, 17, 16, 25]])
    limited = compute_log_probs_from_hidden(hidden, weight, tokens, num_valid_tokens=20).log_probs
    shorter = compute_log_probs_from_hidden(hidden[:, :4], weight[:20], tokens[:, :4]).log_probs
    torch.testing.assert_close(limited[:, :4], shorter)
    assert limited[1, 4] == -math.inf


def test_additive_penalties_need_no_prompt() -> None:
    logits, tokens = torch.zeros(1, 2, 3), torch.tensor([[1, 1]])
    params = SamplingParams(presence_penalty=1.0)
    scored = compute_log_probs(logits, tokens, params=params).log_probs
    assert scored[0].tolist() == pytest.approx([-math.log(3), -1 - math.log(2 + math.exp(-1))])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": torch.zeros(2, 4, dtype=torch.int64)}, ShapeError, "one row a token"),
        ({"token_ids": torch.zeros(2, 3)}, ShapeError, "allowed: an integer type"),
        ({"token_ids": torch.tensor([[0, 1, VOCAB], [0, 0, 0]])}, RolloutError, r"\[0, 2\] is 30"),
        ({"token_ids": torch.tensor([[0, 1, 2], [0, -100, 0]])}, RolloutError, "mask padding"),
        ({"response_mask": torch.ones(2, 4)}, ShapeError, r"its mask \(2, 4\)"),
        ({"response_mask": torch.ones(2, 3, device="meta")}, ShapeError, "is on meta, and what"),
        ({"chunk_size": 0}, ConfigError, "chunk_size is 0; allowed: at least 1"),
        ({"params": SamplingParams(repetition_penalty=1.1)}, ConfigError, "pass prompt_ids"),
        (
            {
                "params": SamplingParams(repetition_penalty=1.1),
                "prompt_ids": torch.zeros(3, 1, dtype=torch.int64),
            },
            ShapeError,
            "3 prompts for 2 responses",
        ),
        ({"params": SamplingParams(logit_bias={VOCAB: 1.0})}, ConfigError, "names token 30"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {
        "logits": torch.zeros(2, 3, VOCAB),
        "token_ids": torch.zeros(2, 3, dtype=torch.int64),
    }
    with pytest.raises(error, match=message):
        compute_log_probs(**{**arguments, **changes})


@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 1, 1], [1, 0, 1]])])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_make_no_distribution_are_an_error(
    bad: float, mask: torch.Tensor | None
) -> None:
    logits = torch.zeros(2, 3, VOCAB)
    logits[1, 2, 7] = bad
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(NonFiniteError, match=r"logits\[1, 2\] hold NaN or \+inf"):
        compute_log_probs(logits, tokens, response_mask=mask)


@pytest.mark.parametrize("weight", [torch.zeros(VOCAB, 7), torch.zeros(VOCAB)])
def test_a_weight_of_another_model_is_an_error(weight: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=r"allowed: \(vocab, hidden_size\)"):
        compute_log_probs_from_hidden(
            torch.zeros(2, 3, 8), weight, torch.zeros(2, 3, dtype=torch.int64)
        )
