"""flash-llm-rl's commands, then a script of vLLM's that nobody edited, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashrl.core.profiles.files import load_profile
from flashrl.testing import Checkpoint

from .w8a8 import PROMPTS, calibrate, make_w8a8
from .workflow import check_pushed, check_started, run_command, run_script


@pytest.mark.parametrize(("suffix", "num_heads"), [("pt", 2), ("safetensors", 4)])
def test_profile_setup_and_an_unedited_script(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path, suffix: str, num_heads: int
) -> None:
    """The engine starts from the W8A8 copy; a push of other weights is smoothed, then quantized."""
    base, other = (checkpoint("qwen2", seed, num_key_value_heads=num_heads) for seed in (0, 1))
    copy = make_w8a8(base.path, tmp_path / "copy", calibrate(base))
    path, config = tmp_path / f"profile.{suffix}", tmp_path / "config.yaml"
    run_command("profile", "-m", base.path, "-qm", copy, "-o", path, "--fn", "int8")
    run_command("setup", "-m", copy, "-p", path, "--fn", "int8", "-o", config)
    profile = load_profile(path)
    # Both norms and up_proj of each layer; v_proj where it feeds o_proj channel by channel.
    assert len(profile.smoothing) == 2 * (4 if num_heads == 4 else 3)

    answer = run_script(
        base.path,
        tmp_path,
        {"FLASHRL_CONFIG": str(config)},
        prompts=PROMPTS,
        scored=PROMPTS,
        pushed=other.path / "model.safetensors",
    )
    assert answer["model"] == str(copy)
    assert answer["started"] != answer["pushed"]
    check_started(tmp_path / "started.safetensors", copy)
    check_pushed(tmp_path / "pushed.safetensors", dict(other.named_tensors()), profile)


def test_the_log_of_an_engines_process_is_where_the_variables_say(
    checkpoint: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """The process that holds the model says at INFO what it changed in vLLM."""
    file = tmp_path / "flashrl.log"
    environ = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "FLASHRL_CONFIG": "int8",
        "FLASHRL_LOGGING_LEVEL": "INFO",
        "FLASHRL_LOGGING_FILE": str(file),
    }
    answer = run_script(checkpoint("qwen2").path, tmp_path, environ, prompts=PROMPTS, scored=[])
    lines = [line.split(" ", 3) for line in file.read_text().splitlines()]
    assert all(words.startswith("INFO flashrl.") for *_, words in lines)
    assert answer["engine_processes"]
    assert {*answer["engine_processes"]} <= {int(process) for *_, process, _ in lines}
