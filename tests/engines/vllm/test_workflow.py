"""flash-llm-rl's commands, then a script of vLLM's that nobody edited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flashrl.core.profiles.files import load_profile
from flashrl.testing import Checkpoint

from .w8a8 import calibrate, is_linear, make_w8a8, quantize, smooth

# Nothing of ours: a trainer's loop around vLLM, that dumps what the engine holds.
UNEDITED = """
import sys
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

def models(llm):
    found = []
    llm.collective_rpc(lambda worker: found.append(worker.get_model()))
    return found

def dump(model, path):
    save_file({n: p.detach().clone().contiguous() for n, p in model.named_parameters()}, path)

if __name__ == "__main__":
    base, pushed, folder = sys.argv[1:]
    llm = LLM(base, dtype="float32", enforce_eager=True, max_model_len=64,
              num_gpu_blocks_override=64, gpu_memory_utilization=0.1)
    dump(models(llm)[0], folder + "/start.safetensors")
    for pair in load_file(pushed + "/model.safetensors").items():
        models(llm)[0].load_weights(iter([pair]))
    dump(models(llm)[0], folder + "/pushed.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": [5, 9, 17, 4]}], params, use_tqdm=False)
    config = llm.llm_engine.vllm_config.model_config
    print("TOKENS", list(out[0].outputs[0].token_ids), config.model)
"""

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
}


def run(*command: Any, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("suffix", "num_heads"), [("pt", 2), ("safetensors", 4)])
def test_profile_setup_and_an_unedited_script(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path, suffix: str, num_heads: int
) -> None:
    """The engine starts from the W8A8 copy; a push of other weights is smoothed, then quantized."""
    base, other = (checkpoint("qwen2", seed, num_key_value_heads=num_heads) for seed in (0, 1))
    copy = make_w8a8(base.path, tmp_path / "copy", calibrate(base))
    path, config = tmp_path / f"profile.{suffix}", tmp_path / "config.yaml"
    run("-m", "flashrl.cli", "profile", "-m", base.path, "-qm", copy, "-o", path, "--fn", "int8")
    run("-m", "flashrl.cli", "setup", "-m", copy, "-p", path, "--fn", "int8", "-o", config)
    profile = load_profile(path)
    # Both norms and up_proj of each layer; v_proj where it feeds o_proj channel by channel.
    assert len(profile.smoothing) == 2 * (4 if num_heads == 4 else 3)

    script = tmp_path / "unedited.py"
    script.write_text(UNEDITED)
    said = run(script, base.path, other.path, tmp_path, FLASHRL_CONFIG=str(config))
    [line] = [line for line in said.splitlines() if line.startswith("TOKENS")]
    assert line.endswith(str(copy))

    disk = load_file(copy / "model.safetensors")
    started = load_file(tmp_path / "start.safetensors")
    pushed = load_file(tmp_path / "pushed.safetensors")
    weights = dict(other.named_tensors())
    for layer in range(2):
        for fused, parts in FUSED.items():
            prefix = f"model.layers.{layer}."
            names = [f"{prefix}{part}.weight" for part in parts]
            assert all(map(is_linear, names))
            expected = torch.cat([quantize(smooth(n, weights[n], profile))[0] for n in names])
            assert torch.equal(pushed[f"{prefix}{fused}.weight"], expected), fused
            assert torch.equal(
                started[f"{prefix}{fused}.weight"], torch.cat([disk[n] for n in names])
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"{prefix}{norm}.weight"
            assert torch.equal(pushed[name], smooth(name, weights[name], profile))
            assert torch.equal(started[name], disk[name].float())
