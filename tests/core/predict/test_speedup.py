"""Predictions against measurements, and against sums done by hand."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.predict import (
    ModelShape,
    TimeSplit,
    Workload,
    compute_step_speedup,
    predict,
)
from flashrl.core.predict.gpus import GPUS
from flashrl.core.schemes import PRESETS, QuantScheme, get_scheme
from flashrl.errors import ConfigError, UnknownNameError, UnsupportedError

# vLLM 0.24 on one H200, CUDA graphs, random weights, 256 sequences of 256 + 256 tokens: tokens/s.
MEASURED = {
    ("qwen2.5-7b", "bf16"): 16_541,
    ("qwen2.5-7b", "fp8_tensor"): 21_108,
    ("qwen2.5-7b", "fp8_channel"): 22_241,
    ("qwen2.5-7b", "int8"): 23_091,
    ("qwen2.5-32b", "bf16"): 3_940,
    ("qwen2.5-32b", "fp8_tensor"): 5_796,
    ("qwen2.5-32b", "int8"): 6_299,
}
SHORT = Workload(batch=256, prompt_length=256, response_length=256)

INT8_FP8_CACHE = get_scheme("int8").evolve(kv_cache="fp8")
# The same engine, 32B, decoding at a context of 6,160 with as many sequences as fit: ms a step.
LONG = [("bf16", 41, 33.9), ("int8", 59, 33.8), (INT8_FP8_CACHE, 118, 48.1)]


@pytest.mark.parametrize(("model", "scheme"), MEASURED)
def test_throughput_is_within_15_percent_of_measured(model: str, scheme: str) -> None:
    """Flash-RL#26, #28, #37: no speed-up, and nobody can say why."""
    found = predict(model, gpu="h200", scheme=scheme, workload=SHORT)
    assert found.tokens_per_second == pytest.approx(MEASURED[model, scheme], rel=0.15)


@pytest.mark.parametrize(("model", "scheme"), MEASURED)
def test_speedup_is_within_15_percent_of_measured(model: str, scheme: str) -> None:
    found = predict(model, gpu="h200", scheme=scheme, workload=SHORT)
    measured = MEASURED[model, scheme] / MEASURED[model, "bf16"]
    assert found.rollout_speedup == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("scheme", "num_sequences", "milliseconds"), LONG)
def test_long_context_step_is_within_15_percent_of_measured(
    scheme: str | QuantScheme, num_sequences: int, milliseconds: float
) -> None:
    workload = Workload(
        batch=num_sequences, prompt_length=6000, response_length=320, memory_utilization=0.95
    )
    found = predict("qwen2.5-32b", gpu="h200", scheme=scheme, workload=workload)
    assert found.num_running == num_sequences
    assert found.decode_step.total * 1e3 == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(("scheme", "num_sequences", "milliseconds"), LONG)
def test_sequences_that_fit_are_within_15_percent_of_measured(
    scheme: str | QuantScheme, num_sequences: int, milliseconds: float
) -> None:
    workload = Workload(
        batch=1000, prompt_length=6000, response_length=330, memory_utilization=0.92
    )
    found = predict("qwen2.5-32b", gpu="h200", scheme=scheme, workload=workload)
    assert found.max_sequences == pytest.approx(num_sequences, rel=0.15)
    assert any("fit at a time" in caution for caution in found.cautions)


@pytest.mark.parametrize(
    ("model", "tokens_per_second"), [("qwen2.5-0.5b", 68_900), ("qwen2.5-7b", 16_100)]
)
def test_figures_that_fitted_nothing_are_met_too(model: str, tokens_per_second: float) -> None:
    """SGLang 0.5.16 on the same GPU, BF16, the same sequences."""
    found = predict(model, gpu="h200", scheme="bf16", workload=SHORT)
    assert found.tokens_per_second == pytest.approx(tokens_per_second, rel=0.15)


def test_the_fit_is_as_good_as_its_documentation_says() -> None:
    found = {
        case: predict(case[0], gpu="h200", scheme=case[1], workload=SHORT) for case in MEASURED
    }
    for (model, scheme), prediction in found.items():
        measured = MEASURED[model, scheme]
        speedup = measured / MEASURED[model, "bf16"]
        assert prediction.tokens_per_second == pytest.approx(measured, rel=0.06)
        assert prediction.rollout_speedup == pytest.approx(speedup, rel=0.08)


def test_update_of_a_large_model_is_within_15_percent_of_measured() -> None:
    """Quantizing 32B parameters in place took 33 ms."""
    found = predict("qwen2.5-32b", gpu="h200", scheme="int8")
    assert found.update_seconds == pytest.approx(33e-3, rel=0.15)


def test_step_speedup_of_the_reports() -> None:
    """Flash-RL#26, #28, #37: generation share 0.7, 1.7 times faster, no sync cost."""
    assert compute_step_speedup(1.7, generation_share=0.7) == pytest.approx(1.405, abs=5e-4)


def test_step_speedup_counts_the_cost_of_syncing() -> None:
    # 100 s: 70 s generate, 30 s train; then 35 s generate, 30 s train, 5 s sync.
    expected = 100 / (35 + 30 + 5)
    assert compute_step_speedup(2.0, generation_share=0.7, sync_share=0.05) == pytest.approx(
        expected
    )


@given(speedup=st.floats(0.1, 100), share=st.floats(0, 1))
def test_step_speedup_lies_between_one_and_the_rollouts(speedup: float, share: float) -> None:
    found = compute_step_speedup(speedup, generation_share=share)
    assert min(1.0, speedup) - 1e-9 <= found <= max(1.0, speedup) + 1e-9


@pytest.mark.parametrize(
    ("speedup", "arguments"),
    [
        (0.0, {}),
        (float("nan"), {}),
        (float("inf"), {}),
        (2.0, {"generation_share": 1.1}),
        (2.0, {"generation_share": -0.1}),
        (2.0, {"sync_share": -0.1}),
    ],
)
def test_impossible_shares_are_refused(speedup: float, arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must"):
        compute_step_speedup(speedup, **arguments)


def test_memory_is_the_weights_own() -> None:
    found = predict("qwen2.5-7b", gpu="h200", scheme="int8")
    embeddings = 2 * 152064 * 3584
    linears = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944)
    assert found.weight_bytes == 2 * embeddings + linears
    assert found.memory_saved_bytes == linears


def test_a_step_that_only_reads_weights_takes_their_size_over_the_bandwidth() -> None:
    found = predict(
        "qwen2.5-72b",
        gpu="b200",
        scheme="int8",
        workload=Workload(batch=1, prompt_length=1, response_length=1),
    )
    linears = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 29568)
    lm_head = 152064 * 8192
    expected = (linears + 2 * lm_head) / (7700e9 * 4252 / 4800)
    assert found.bound_by == "weights"
    assert found.decode_step.weights == pytest.approx(expected, rel=1e-3)


def test_what_binds_follows_the_workload() -> None:
    def bound_by(model: str, **workload: Any) -> str:
        return predict(model, gpu="h200", scheme="bf16", workload=Workload(**workload)).bound_by

    assert bound_by("qwen2.5-32b", batch=4, response_length=2000) == "weights"
    assert bound_by("qwen2.5-7b", batch=512, prompt_length=8000, response_length=8) == "compute"
    assert bound_by("qwen2.5-7b", batch=64, response_length=32_000) == "kv_cache"
    assert bound_by("qwen2.5-0.5b", batch=8, response_length=512) == "overhead"


def test_small_models_gain_nothing_and_large_ones_much() -> None:
    small = predict("qwen2.5-0.5b", gpu="h100", scheme="int8", workload=SHORT)
    large = predict("qwen2.5-32b", gpu="h100", scheme="int8", workload=SHORT)
    assert small.rollout_speedup is not None
    assert large.rollout_speedup is not None
    assert small.rollout_speedup < 1.05
    assert large.rollout_speedup > 1.4


def test_sixteen_bit_against_itself_is_one() -> None:
    found = predict("qwen2.5-7b", gpu="h100", scheme="bf16")
    assert (found.rollout_speedup, found.step_speedup, found.memory_saved_bytes) == (1, 1, 0)


def test_step_speedup_of_a_prediction_counts_the_update() -> None:
    workload = Workload(batch=2, prompt_length=8, response_length=4, generation_share=0.5)
    found = predict("qwen2.5-32b", gpu="h200", scheme="int8", workload=workload)
    assert found.rollout_speedup is not None
    generation = found.time.total * found.rollout_speedup
    step = 2 * generation
    expected = step / (generation + found.time.total + found.update_seconds)
    assert found.step_speedup == pytest.approx(expected)


def test_a_model_that_fits_in_8_bit_only_has_no_speedup_to_state() -> None:
    found = predict("qwen2.5-72b", gpu="h200", scheme="int8")
    assert found.rollout_speedup is None
    assert found.step_speedup is None
    assert found.tokens_per_second > 0
    assert any("16-bit weights do not fit" in caution for caution in found.cautions)


def test_what_does_not_fit_says_how_large_it_is() -> None:
    with pytest.raises(UnsupportedError, match=r"145\.4 GB.*raise tensor_parallel_size"):
        predict("qwen2.5-72b", gpu="h200", scheme="bf16")


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="28 attention heads"):
        predict("qwen2.5-7b", gpu="h200", workload=Workload(tensor_parallel_size=8))


def test_a100_has_no_fp8_and_says_so() -> None:
    with pytest.raises(UnsupportedError, match="no fp8 units"):
        predict("qwen2.5-7b", gpu="a100", scheme="fp8")


def test_b200_cautions_about_int8_alone() -> None:
    assert "prefer fp8" in predict("qwen2.5-7b", gpu="b200", scheme="int8").cautions[0]
    assert predict("qwen2.5-7b", gpu="b200", scheme="fp8").cautions == ()


def test_unknown_scheme_and_gpu_list_the_known() -> None:
    with pytest.raises(UnknownNameError, match="fp8_channel"):
        predict("qwen2.5-7b", gpu="h200", scheme="int9")
    with pytest.raises(UnknownNameError, match="h200"):
        predict("qwen2.5-7b", gpu="tpu")


def test_every_fault_of_a_workload_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Workload(batch=0, response_length=1.5, generation_share=0, memory_utilization=1.2)  # type: ignore[arg-type]
    for name in ("batch", "response_length", "generation_share", "memory_utilization"):
        assert name in str(caught.value)


def test_tensor_parallelism_divides_the_memory_and_costs_communication() -> None:
    one = predict("qwen2.5-32b", gpu="h200", scheme="int8", workload=SHORT)
    four = predict(
        "qwen2.5-32b",
        gpu="h200",
        scheme="int8",
        workload=attrs.evolve(SHORT, tensor_parallel_size=4),
    )
    assert four.weight_bytes == one.weight_bytes / 4
    assert one.time.communication == 0 < four.time.communication
    assert one.tokens_per_second < four.tokens_per_second < 4 * one.tokens_per_second


def test_tensor_parallelism_beyond_the_key_value_heads_replicates_them() -> None:
    def fit(shards: int) -> int:
        workload = Workload(batch=10**6, tensor_parallel_size=shards)
        return predict("qwen2.5-7b", gpu="h200", workload=workload).max_sequences

    assert fit(4) > 3.9 * fit(1)
    assert fit(28) < 1.2 * fit(4)


MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def test_experts_cost_as_many_bytes_as_are_visited() -> None:
    def weights(batch: int) -> float:
        workload = Workload(batch=batch, prompt_length=64, response_length=64)
        return predict(MOE, gpu="h200", scheme="bf16", workload=workload).decode_step.weights

    bandwidth = 4800e9 * 0.886
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    head = 151936 * 2048
    one_expert = 48 * 3 * 2048 * 768
    assert weights(1) == pytest.approx(2 * (attention + head + 8 * one_expert) / bandwidth)
    assert weights(64) == pytest.approx(
        2 * (attention + head + 128 * (1 - (15 / 16) ** 64) * one_expert) / bandwidth
    )


def test_mixture_of_experts_gains_more_than_a_dense_model_of_its_active_size() -> None:
    """Nearly all experts are read for few tokens each, and reading is what 8 bit halves."""
    moe = predict(MOE, gpu="h200", scheme="int8", workload=SHORT)
    dense = predict("qwen2.5-3b", gpu="h200", scheme="int8", workload=SHORT)
    assert moe.rollout_speedup is not None
    assert dense.rollout_speedup is not None
    assert moe.rollout_speedup > dense.rollout_speedup


@given(
    model=st.sampled_from(["qwen2.5-1.5b", "qwen2.5-14b"]),
    gpu=st.sampled_from(sorted(GPUS)),
    batch=st.integers(1, 512),
    prompt=st.integers(1, 2048),
    response=st.integers(1, 4096),
)
def test_more_work_never_takes_less_time(
    model: str, gpu: str, batch: int, prompt: int, response: int
) -> None:
    def seconds(**workload: int) -> float:
        return predict(model, gpu=gpu, scheme="int8", workload=Workload(**workload)).time.total

    load = {"batch": batch, "prompt_length": prompt, "response_length": response}
    base = seconds(**load)
    for key, value in load.items():
        assert seconds(**load | {key: value + 1}) >= base * (1 - 1e-9)


@given(scheme=st.sampled_from(sorted(PRESETS)), batch=st.integers(1, 512))
def test_parts_sum_to_the_whole(scheme: str, batch: int) -> None:
    found = predict("qwen2.5-7b", gpu="h200", scheme=scheme, workload=Workload(batch=batch))
    parts = attrs.asdict(found.time)
    assert sum(parts.values()) == pytest.approx(found.time.total)
    assert parts[found.bound_by] == max(parts.values())
    assert found.tokens_per_second * found.time.total == pytest.approx(batch * 2048)


def test_time_splits_add_and_scale_by_part() -> None:
    one = TimeSplit(weights=1.0, overhead=2.0)
    two = TimeSplit(weights=0.5, compute=4.0)
    assert (one + two) * 2 == TimeSplit(weights=3.0, compute=8.0, overhead=4.0)


def test_shape_and_data_sheet_objects_are_taken_as_they_are() -> None:
    slow = attrs.evolve(GPUS["h200"], bandwidth_gb_s=GPUS["h200"].bandwidth_gb_s / 2)
    shape = ModelShape.from_config("qwen2.5-32b")
    workload = Workload(batch=1, prompt_length=64, response_length=64)
    fast = predict(shape, gpu="h200", workload=workload)
    assert predict(shape, gpu=slow, workload=workload).decode_step.weights == pytest.approx(
        2 * fast.decode_step.weights
    )
