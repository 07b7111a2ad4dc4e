"""The distribution that is sampled: against plain Python, Transformers' warpers, and its draws."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashrl.core.log_probs.penalties import TokenHistory
from flashrl.core.log_probs.sampling import adjust_logits, process_logits, sample, truncate_logits
from flashrl.core.rollouts import SamplingParams
from flashrl.errors import ConfigError, NonFiniteError, ShapeError

VOCAB = 24

PARAMS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "bias": SamplingParams(logit_bias={3: 4.0, 7: -100.0}),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "rewarded": SamplingParams(repetition_penalty=0.7, presence_penalty=-0.4),
    "presence": SamplingParams(presence_penalty=0.9),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "greedy": SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.3, logit_bias={1: 2.0}),
    "all": SamplingParams(
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={0: 1.5, 11: -2.0},
    ),
}


def reference(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> tuple[list[float], float]:
    """Probabilities and surviving mass in plain Python floats, a step at a time."""
    x = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    counts = Counter(output)
    for token in {*prompt, *output}:
        if x[token] > 0:
            x[token] /= params.repetition_penalty
        else:
            x[token] *= params.repetition_penalty
    for token, count in counts.items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature > 0:
        x = [value / params.temperature for value in x]
    weights = [math.exp(value - max(x)) for value in x]
    probs = [weight / sum(weights) for weight in weights]
    if params.temperature == 0:
        return probs, 1.0
    order = sorted(range(len(x)), key=lambda token: (-probs[token], token))
    kept = [token for token in order if probs[token] >= params.min_p * max(probs)]
    if params.top_k:
        last = kept[: params.top_k][-1]
        kept = [token for token in kept if probs[token] >= probs[last]]
    mass, nucleus = sum(probs[token] for token in kept), 0.0
    smallest = []
    for token in kept:
        if nucleus / mass >= params.top_p and smallest:
            break
        smallest.append(token)
        nucleus += probs[token]
    return [p / nucleus if t in smallest else 0.0 for t, p in enumerate(probs)], nucleus


def history_of(prompts: list[list[int]], outputs: list[list[int]]) -> TokenHistory:
    history = TokenHistory.start(torch.tensor(prompts), vocab_size=VOCAB)
    history.append(torch.tensor(outputs))
    return history


@pytest.mark.parametrize("name", PARAMS)
def test_distribution_equals_plain_python(name: str) -> None:
    """The log-probability is that of the distribution sampled, whatever was on.

    flash-llm-rl's patched sampler left out penalties, min_p and logit_bias.
    """
    params = PARAMS[name]
    logits = torch.randn(40, VOCAB) * 3
    prompts = torch.randint(0, VOCAB, (40, 6)).tolist()
    outputs = torch.randint(0, VOCAB, (40, 9)).tolist()
    actual = process_logits(logits, params, history=history_of(prompts, outputs)).softmax(-1)
    for row in range(40):
        expected, _ = reference(logits.double()[row].tolist(), params, prompts[row], outputs[row])
        torch.testing.assert_close(
            actual[row].double(), torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0
        )


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_changes_the_distribution(name: str) -> None:
    """No parameter is silently ignored."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.9, 0.5, 0.4, -0.5, -0.7, *[-1.0] * (VOCAB - 8)]])
    history = history_of([[0, 1, 1]], [[2, 2, 6]])
    changed = process_logits(logits, PARAMS[name], history=history).softmax(-1)
    assert (name == "plain") == torch.equal(changed, logits.softmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.6])
def test_equals_transformers_warpers(temperature: float) -> None:
    """Same semantics as Transformers', called in vLLM's order, support and values."""
    logits = torch.randn(200, 300) * 3
    prompt = torch.randint(0, 300, (200, 20))
    params = SamplingParams(
        temperature=temperature, top_k=40, top_p=0.85, min_p=0.01, repetition_penalty=1.3
    )
    expected = logits
    for warper in (
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(temperature),
        MinPLogitsWarper(0.01),
        TopKLogitsWarper(40),
        TopPLogitsWarper(0.85),
    ):
        expected = warper(prompt, expected)
    actual = process_logits(logits, params, history=TokenHistory.start(prompt, vocab_size=300))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.99])
def test_top_p_keeps_as_many_ties_as_transformers(top_p: float) -> None:
    """The kept values are the same; which of the tied tokens have them is a sort's whim there."""
    logits = torch.randint(0, 4, (300, 50)).float()
    expected = TopPLogitsWarper(top_p)(None, logits)
    actual = process_logits(logits, SamplingParams(top_p=top_p))
    assert torch.equal(actual.sort(-1).values, expected.sort(-1).values)


def test_top_p_takes_tied_tokens_in_the_order_of_their_ids() -> None:
    """Ours is no whim: the lower id first, as argmax has it."""
    logits = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    kept = process_logits(logits, SamplingParams(top_p=0.6)) > -math.inf
    assert kept.tolist() == [True, True, False, True, False]


def test_top_k_keeps_every_tie() -> None:
    """As vLLM and Transformers: more than k tokens survive a tie with the k-th."""
    logits = torch.randint(0, 4, (300, 50)).float()
    actual = process_logits(logits, SamplingParams(top_k=3))
    assert torch.equal(actual, TopKLogitsWarper(3)(None, logits))
    assert ((actual > -math.inf).sum(-1) > 3).any()


@pytest.mark.parametrize(
    ("probs", "params", "support"),
    [
        ([0.5, 0.3, 0.2], SamplingParams(top_p=0.8), [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], SamplingParams(top_p=0.7), [0, 1]),
        ([0.6, 0.2, 0.1, 0.1], SamplingParams(top_p=0.9), [0, 1, 2]),
        ([0.6, 0.3, 0.1], SamplingParams(top_p=1e-9), [0]),
        ([0.6, 0.3, 0.1], SamplingParams(min_p=0.5), [0, 1]),
        ([0.5, 0.25, 0.25], SamplingParams(min_p=1.0), [0]),
        ([0.4, 0.3, 0.2, 0.1], SamplingParams(top_k=2, top_p=0.5), [0]),  # 4/7 reaches 0.5
        ([0.4, 0.3, 0.2, 0.1], SamplingParams(min_p=0.5, top_p=0.5), [0, 1]),  # 4/9 does not
        ([0.7, 0.3], SamplingParams(top_k=99), [0, 1]),
    ],
)
def test_support_at_the_edge(
    probs: list[float], params: SamplingParams, support: list[int]
) -> None:
    """A mass or ratio equal to the bound reaches it, whatever float32 makes of the sum."""
    kept = process_logits(torch.tensor(probs).log(), params) > -math.inf
    assert kept.nonzero().flatten().tolist() == support


def test_the_edge_is_where_exact_fractions_put_it() -> None:
    """Every distribution in tenths, every bound in tenths: top-p and min-p against Fractions.

    Plain float32 sums land on either side of such bounds.
    """
    tenths = [Fraction(n, 10) for n in range(1, 11)]
    vectors = [
        [b - a for a, b in pairwise((Fraction(0), *cuts, Fraction(1)))]
        for size in range(4)
        for cuts in combinations(tenths[:-1], size)
    ]
    for probs in vectors:
        logits = torch.tensor([float(p) for p in probs]).log()
        order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
        for bound in tenths:
            before = accumulate((probs[token] for token in order), initial=Fraction(0))
            nucleus = {token for token, mass in zip(order, before, strict=False) if mass < bound}
            kept = process_logits(logits, SamplingParams(top_p=float(bound))) > -math.inf
            assert set(kept.nonzero().flatten().tolist()) == nucleus, (probs, bound)
            likely = {token for token in order if probs[token] >= bound * max(probs)}
            kept = process_logits(logits, SamplingParams(min_p=float(bound))) > -math.inf
            assert set(kept.nonzero().flatten().tolist()) == likely, (probs, bound)


def test_a_flat_distribution_is_cut_where_float64_cuts_it() -> None:
    """Where the edge token holds a millionth of the mass, the float32 sums before it must be right.

    A hundred rows of 20 000 tokens: cutting 2e-7 early would already miss in some of them.
    """
    logits = torch.randn(100, 20_000) * 4
    probs, order = logits.double().softmax(-1).sort(-1, descending=True)
    nucleus = torch.zeros_like(logits, dtype=torch.bool)
    nucleus.scatter_(-1, order, probs.cumsum(-1) - probs < 0.95)
    assert torch.equal(process_logits(logits, SamplingParams(top_p=0.95)) > -math.inf, nucleus)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_raised_first(dtype: torch.dtype) -> None:
    """The result is that of the same logits given in float32, to the bit."""
    logits = (torch.randn(8, 100) * 4).to(dtype)
    processed = process_logits(logits, SamplingParams(temperature=0.7, top_p=0.9))
    assert processed.dtype == torch.float32
    assert torch.equal(
        processed, process_logits(logits.float(), SamplingParams(temperature=0.7, top_p=0.9))
    )


def test_float64_logits_stay() -> None:
    assert process_logits(torch.randn(2, 5).double(), SamplingParams()).dtype == torch.float64


def test_processing_leaves_the_logits_alone() -> None:
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    process_logits(logits, PARAMS["all"], history=history_of([[1]] * 4, [[2]] * 4))
    assert torch.equal(logits, before)


def test_ids_past_the_tokenizer_are_ruled_out() -> None:
    """A padded vocabulary: as if the logits had ended there (verl masks them in vLLM only)."""
    logits = torch.randn(6, 40)
    params = SamplingParams(top_p=0.9, min_p=0.01)
    limited = process_logits(logits, params, num_valid_tokens=30)
    assert torch.equal(limited[:, :30], process_logits(logits[:, :30], params))
    assert (limited[:, 30:] == -math.inf).all()
    assert torch.equal(
        process_logits(logits, params, num_valid_tokens=40), process_logits(logits, params)
    )


@pytest.mark.parametrize("num_valid_tokens", [0, -1, 41])
def test_a_wrong_number_of_valid_tokens_is_an_error(num_valid_tokens: int) -> None:
    with pytest.raises(ConfigError, match="allowed: 1 to 40"):
        process_logits(torch.zeros(1, 40), SamplingParams(), num_valid_tokens=num_valid_tokens)


def test_a_bias_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ConfigError, match="names token 24; the vocabulary has 24"):
        process_logits(torch.zeros(1, VOCAB), SamplingParams(logit_bias={24: 1.0}))


def test_a_penalty_without_history_is_an_error() -> None:
    """A penalty is never skipped because its input is missing."""
    with pytest.raises(ConfigError, match="no history was given"):
        process_logits(torch.zeros(1, VOCAB), SamplingParams(presence_penalty=0.1))


def test_a_history_of_another_batch_is_an_error() -> None:
    with pytest.raises(ShapeError, match="history is of shape"):
        process_logits(
            torch.zeros(2, VOCAB),
            SamplingParams(presence_penalty=0.1),
            history=history_of([[1]], [[1]]),
        )


@pytest.mark.parametrize("name", PARAMS)
def test_draws_follow_the_log_probs(name: str) -> None:
    """200 000 draws against exp(log_probs), chi-square; a filtered token is never drawn."""
    params = PARAMS[name]
    num_draws = 200_000
    logits = torch.randn(1, VOCAB) * 2
    history = history_of([[0, 1, 2]], [[3, 3, 4]])
    many = TokenHistory(
        in_prompt=history.in_prompt.expand(num_draws, -1),
        counts=history.counts.expand(num_draws, -1),
    )
    drawn = sample(
        logits.expand(num_draws, -1), params, torch.Generator().manual_seed(1), history=many
    )
    probs, mass = reference(logits[0].double().tolist(), params, [0, 1, 2], [3, 3, 4])
    observed = torch.bincount(drawn.token_ids, minlength=VOCAB).double()
    if params.greedy:
        assert observed[max(range(VOCAB), key=probs.__getitem__)] == num_draws
    else:
        expected = torch.tensor(probs, dtype=torch.float64) * num_draws
        assert observed[expected == 0].sum() == 0
        possible = expected > 0
        assert stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-3
    assert drawn.log_probs.exp().sub(torch.tensor(probs)[drawn.token_ids]).abs().max() < 1e-5
    assert drawn.log_mass.exp().sub(mass).abs().max() < 1e-5


def test_the_same_generator_state_draws_the_same_tokens() -> None:
    logits = torch.randn(64, 500)
    params = SamplingParams(temperature=1.2, top_p=0.95)
    first, second, other = (
        sample(logits, params, torch.Generator().manual_seed(seed)).token_ids for seed in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_without_truncation_the_whole_mass_survives() -> None:
    assert torch.equal(sample(torch.randn(4, 9), SamplingParams()).log_mass, torch.zeros(4))


def test_greedy_reports_the_untempered_log_prob() -> None:
    """At temperature 0, vLLM reports the log-softmax of the logits as they are."""
    drawn = sample(torch.tensor([[2.0, 1.0, 0.0]]), SamplingParams(temperature=0.0))
    assert drawn.token_ids.tolist() == [0]
    assert drawn.log_probs.item() == pytest.approx(-0.4076, abs=1e-4)


def test_greedy_takes_the_largest_logit_however_close() -> None:
    """Over a large vocabulary log_softmax rounds logits this close to one value."""
    logits = torch.zeros(1, 50_000)
    logits[0, 777] = 1e-8
    assert logits.log_softmax(-1).unique().numel() == 1
    assert sample(logits, SamplingParams(temperature=0.0)).token_ids.tolist() == [777]


@pytest.mark.parametrize("params", [SamplingParams(), PARAMS["greedy"], SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_make_no_distribution_are_an_error(params: SamplingParams, bad: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 4] = bad
    with pytest.raises(NonFiniteError, match=r"logits\[1\] hold NaN or \+inf"):
        sample(logits, params)


def test_logits_that_rule_everything_out_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="rule out every token"):
        sample(torch.full((1, 4), -math.inf), SamplingParams())


def test_a_ruled_out_token_stays_ruled_out() -> None:
    """A grammar's -inf passes through every step without making NaN."""
    logits = torch.randn(50, VOCAB)
    logits[:, 2:] = -math.inf
    params = SamplingParams(temperature=0.5, top_k=10, top_p=0.99, min_p=0.001)
    drawn = sample(logits, params, torch.Generator().manual_seed(0))
    assert drawn.token_ids.max() < 2
    assert drawn.log_probs.isfinite().all()


def test_sampling_takes_one_row_a_sequence() -> None:
    with pytest.raises(ShapeError, match="allowed: \\(batch, vocab\\)"):
        sample(torch.zeros(2, 3, 4), SamplingParams())


def test_an_empty_batch_is_no_special_case() -> None:
    assert sample(torch.zeros(0, 8), SamplingParams(top_p=0.9)).token_ids.shape == (0,)


def test_truncation_passes_the_gradient_of_what_survives() -> None:
    """Filtered tokens get no gradient, the others that of the renormalised softmax."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
    truncate_logits(logits, SamplingParams(top_k=2)).log_softmax(-1)[0].backward()
    p = math.exp(1) / (1 + math.exp(1))
    torch.testing.assert_close(logits.grad, torch.tensor([1 - p, p - 1, 0.0, 0.0]))


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB).map(torch.tensor)


@given(rows, sampling_params)
def test_law_the_most_likely_token_survives(logits: torch.Tensor, params: SamplingParams) -> None:
    kept = process_logits(logits, params) > -math.inf
    assert kept[logits == logits.max()].any()


@given(rows, sampling_params)
def test_law_what_is_kept_is_at_least_as_likely_as_what_is_not(
    logits: torch.Tensor, params: SamplingParams
) -> None:
    kept = process_logits(logits, params) > -math.inf
    dropped = logits.masked_fill(kept, -math.inf).max()
    assert logits[kept].min() >= dropped


@given(rows, sampling_params)
def test_law_truncation_divides_by_the_surviving_mass(
    logits: torch.Tensor, params: SamplingParams
) -> None:
    """Log μ = log π - log S on the support, so that S corrects a full-support trainer."""
    drawn = sample(logits[None], params, torch.Generator().manual_seed(0))
    full = adjust_logits(logits, params).log_softmax(-1)
    assert drawn.log_probs.item() + drawn.log_mass.item() == pytest.approx(
        full[drawn.token_ids].item(), abs=1e-5
    )


@given(rows, sampling_params, st.permutations(range(VOCAB)))
def test_law_renaming_tokens_renames_the_distribution(
    logits: torch.Tensor, params: SamplingParams, order: list[int]
) -> None:
    logits = logits + torch.arange(VOCAB) * 1e-3  # apart, so that no tie hangs on the id
    expected = process_logits(logits, params)[order]
    assert torch.equal(process_logits(logits[order], params) > -math.inf, expected > -math.inf)


@given(rows, sampling_params, st.floats(0.3, 1.0))
def test_law_stricter_parameters_keep_less(
    logits: torch.Tensor, params: SamplingParams, factor: float
) -> None:
    stricter = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p * factor,
        min_p=params.min_p,
    )
    kept, fewer = (process_logits(logits, p) > -math.inf for p in (params, stricter))
    assert not (fewer & ~kept).any()
