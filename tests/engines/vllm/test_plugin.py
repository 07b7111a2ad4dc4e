"""What the plugin does in a process: names for quantizations, and FLASHRL_CONFIG."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashrl
from flashrl.core.schemes import get_scheme
from flashrl.engines.vllm import compat
from flashrl.engines.vllm.linear import FlashRLLinearMethod
from flashrl.errors import ConfigError, SchemeError, UnknownNameError
from flashrl.testing import Checkpoint

from .conftest import worker_of

UNEDITED = """
import sys
from vllm import LLM, SamplingParams
from safetensors.torch import load_file

def models(llm):
    found = []
    llm.collective_rpc(lambda worker: found.append(worker.get_model()))
    return found

if __name__ == "__main__":
    a, b = sys.argv[1:]
    llm = LLM(a, dtype="float32", enforce_eager=True, max_model_len=64, num_gpu_blocks_override=64,
              gpu_memory_utilization=0.1)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    print(sorted({type(m.quant_method).__name__ for m in models(llm)[0].modules()
                  if hasattr(m, "quant_method")}))
    for path in (b, a, b):
        for pair in load_file(path + "/model.safetensors").items():
            models(llm)[0].load_weights(iter([pair]))
        llm.reset_prefix_cache()
        out = llm.generate([{"prompt_token_ids": [5, 9, 17, 4]}], params, use_tqdm=False)
        print(list(out[0].outputs[0].token_ids))
"""


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """FLASHRL_CONFIG as it works in a process that starts with it."""

    def inject(value: str) -> None:
        monkeypatch.setenv("FLASHRL_CONFIG", value)
        compat.inject_engine_args()

    yield inject
    compat.restore_engine_args()


def engine_config(path: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(path), dtype="float32", enforce_eager=True, max_model_len=64, **arguments
    ).create_engine_config()


def test_without_a_configuration_engine_arguments_are_left_alone(
    checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delenv("FLASHRL_CONFIG", raising=False)
    from flashrl.engines.vllm.plugin import register

    register.cache_clear()
    register()
    register()
    assert not hasattr(EngineArgs.create_engine_config, "flashrl_original")
    config = engine_config(checkpoint().path)
    assert config.model_config.quantization is None
    assert config.model_config.logprobs_mode == "raw_logprobs"


@pytest.mark.parametrize(
    ("value", "quantization"),
    [("int8", "flashrl_int8"), ("fp8", "flashrl_fp8_channel"), ("fp8_vllm", "flashrl_fp8_tensor")],
)
def test_a_configuration_sets_quantization_and_log_prob_mode(
    injected: Callable[[str], None],
    checkpoint: Callable[..., Checkpoint],
    value: str,
    quantization: str,
) -> None:
    injected(value)
    injected(value)
    config = engine_config(checkpoint().path)
    assert config.model_config.quantization == quantization
    assert config.model_config.logprobs_mode == "processed_logprobs"


def test_bf16_in_a_configuration_quantizes_nothing(
    injected: Callable[[str], None], checkpoint: Callable[..., Checkpoint]
) -> None:
    injected("bf16")
    config = engine_config(checkpoint().path)
    assert config.model_config.quantization is None
    assert config.model_config.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize(
    "arguments", [{"quantization": "fp8"}, {"logprobs_mode": "raw_logits"}], ids=repr
)
def test_a_contradicting_argument_is_an_error_that_names_both(
    injected: Callable[[str], None],
    checkpoint: Callable[..., Checkpoint],
    arguments: dict[str, str],
) -> None:
    injected("int8")
    [(name, value)] = arguments.items()
    with pytest.raises(ConfigError) as caught:
        engine_config(checkpoint().path, **arguments)
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert "FLASHRL_CONFIG=int8" in str(caught.value)


def test_an_unknown_scheme_lists_the_known(
    injected: Callable[[str], None], checkpoint: Callable[..., Checkpoint]
) -> None:
    injected("int9")
    with pytest.raises(ConfigError, match="int8"):
        engine_config(checkpoint().path)


def test_a_profile_and_overrides_of_the_users_own_travel_together(
    injected: Callable[[str], None], checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("configs: [{fn: int8, profile: profile.safetensors}]")
    injected(str(file))
    config = engine_config(checkpoint().path, hf_overrides={"rope_theta": 5000.0})
    assert config.model_config.quantization == "flashrl"
    assert config.model_config.hf_config.quantization_config["profile"] == "profile.safetensors"
    assert config.model_config.hf_config.rope_theta == 5000.0
    taken = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ConfigError, match="hf_overrides"):
        engine_config(checkpoint().path, hf_overrides=taken)


def test_static_scales_need_a_profile(
    injected: Callable[[str], None], checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("configs: [{fn: int8, dynamic: false}]")
    injected(str(file))
    with pytest.raises(ConfigError, match="profile"):
        engine_config(checkpoint().path)


def test_ranks_that_start_together_start_from_one_model(
    injected: Callable[[str], None], checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from flashrl.engines.vllm.arguments import configure

    file = tmp_path / "config.yaml"
    file.write_text("configs: [{fn: int8, model: some/w8a8}, {fn: bf16}]")
    injected(str(file))
    args = EngineArgs(model=str(checkpoint().path), data_parallel_size=2)
    with pytest.raises(ConfigError, match="several models"):
        configure(args)
    first = EngineArgs(model=str(checkpoint().path), data_parallel_size=2, data_parallel_rank=0)
    configure(first)
    assert first.model == "some/w8a8"


@pytest.mark.parametrize(("rank", "quantization"), [(0, "flashrl_int8"), (1, None), (2, None)])
def test_each_data_parallel_rank_uses_its_entry(
    injected: Callable[[str], None],
    checkpoint: Callable[..., Checkpoint],
    tmp_path: Path,
    rank: int,
    quantization: str | None,
) -> None:
    """Hybrid precision: rank r uses entry r mod n."""
    from vllm.engine.arg_utils import EngineArgs

    file = tmp_path / "config.yaml"
    entries = ["int8", "bf16", "bf16"]
    file.write_text("configs: [" + ", ".join(f"{{fn: {e}}}" for e in entries) + "]")
    injected(str(file))
    from flashrl.engines.vllm.arguments import configure

    args = EngineArgs(model=str(checkpoint().path), data_parallel_size=3, data_parallel_rank=rank)
    configure(args)
    assert args.quantization == quantization


def test_a_scheme_of_ones_own_travels_in_the_arguments(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    scheme = get_scheme("int8").evolve(
        name="no_down", ignore=("lm_head", "re:.*down_proj", "model.layers.0")
    )
    llm = engine(checkpoint().path, **flashrl.launch_args("vllm", scheme))
    session = flashrl.attach(llm, scheme)
    quantized = {n for n, info in session.engine.weights().items() if info.scheme is not None}
    assert quantized == {
        f"model.layers.1.{layer}.weight"
        for layer in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
    }
    for seed in (1, 0):
        session.update_weights(checkpoint(seed=seed).named_tensors())
        assert session.verify(checkpoint(seed=seed).named_tensors()).ok


def test_attaching_another_scheme_than_the_engine_was_started_with_is_an_error(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    llm = engine(checkpoint().path, **flashrl.launch_args("vllm", "int8"))
    with pytest.raises(SchemeError, match=r"int8.*fp8_channel"):
        flashrl.attach(llm, "fp8_channel")
    with pytest.raises(UnknownNameError, match="fp8_channel"):
        flashrl.attach(llm, "fp9")


def test_half_of_a_fused_layer_can_not_be_ignored(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    """vllm#11354: and the engine is as it was."""
    llm = engine(checkpoint().path)
    scheme = get_scheme("int8").evolve(name="half", ignore=("re:.*q_proj",))
    with pytest.raises(SchemeError, match="qkv_proj"):
        flashrl.attach(llm, scheme)
    methods = [getattr(m, "quant_method", None) for m in worker_of(llm).get_model().modules()]
    assert not any(isinstance(method, FlashRLLinearMethod) for method in methods)


def test_blocks_that_end_inside_a_shard_are_refused_by_name(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint]
) -> None:
    small = checkpoint("llama", num_key_value_heads=1)
    with pytest.raises(SchemeError, match=r"layers\.0\.self_attn\.qkv_proj.*64"):
        flashrl.attach(engine(small.path), "fp8_block")


def test_an_unedited_script_runs_in_8_bit(
    engine: Callable[..., Any], checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """float32 on a CPU: vLLM's packed lm_head would be stale by nats after a push."""
    from vllm import SamplingParams

    script = tmp_path / "unedited.py"
    script.write_text(UNEDITED)
    paths = [str(checkpoint(seed=seed).path) for seed in (0, 1)]
    done = subprocess.run(
        [sys.executable, str(script), *paths],
        env={**os.environ, "FLASHRL_CONFIG": "int8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert "FlashRLLinearMethod" in lines[0]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers = []
    for seed in (0, 1):
        fresh = engine(checkpoint(seed=seed).path, **flashrl.launch_args("vllm", "int8"))
        flashrl.attach(fresh, "int8").update_weights(checkpoint(seed=seed).named_tensors())
        outputs = fresh.generate([{"prompt_token_ids": [5, 9, 17, 4]}], params, use_tqdm=False)
        answers.append(str(list(outputs[0].outputs[0].token_ids)))
    assert answers[0] != answers[1]
    assert lines[1:] == [answers[1], answers[0], answers[1]]
