"""What the tests of the commands share: running them, the script, and a check of what it held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flashrl.core.profiles import Profile

from .w8a8 import is_linear, quantize, smooth

SCRIPT = Path(__file__).with_name("unedited.py")
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def run(*command: Any, python: str = sys.executable, **environ: str) -> str:
    """Run Python; what it prints."""
    done = subprocess.run(
        [python, *map(str, command)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run_command(*arguments: Any) -> str:
    """Run ``flashrl`` as a shell would."""
    return run("-m", "flashrl.cli", *arguments)


def run_script(model: Path, folder: Path, environ: Mapping[str, str], **request: Any) -> Any:
    """Run the script that nobody edited, and tell it by variables alone what to do."""
    file = folder / "request.json"
    file.write_text(json.dumps({"folder": folder, **request}, default=str))
    said = run(SCRIPT, model, file, **environ)
    [line] = [line for line in said.splitlines() if line.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER "))


def check_started(path: Path, copy: Path) -> None:
    """The engine holds what is in a W8A8 copy, 16-bit tensors as float32."""
    disk = load_file(copy / "model.safetensors")
    expected = {name: t if t.dtype == torch.int8 else t.float() for name, t in disk.items()}
    _check(load_file(path), expected)


def check_pushed(path: Path, weights: Mapping[str, torch.Tensor], profile: Profile) -> None:
    """The engine holds weights that were smoothed and rounded by hand, bit for bit."""
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        expected[name] = smooth(name, tensor, profile)
        if is_linear(name):
            expected[name], expected[f"{name}_scale"] = quantize(expected[name])
    _check(load_file(path), expected)


def _check(held: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The engine holds each tensor of a checkpoint, some as rows of a larger one."""
    found: list[str] = []
    for name, tensor in held.items():
        names = [name]
        for fused, parts in FUSED.items():
            if f".{fused}." in name:
                names = [name.replace(fused, part) for part in parts]
        rows = torch.cat([expected[part] for part in names])
        # vLLM pads the vocabulary.
        assert torch.equal(tensor[: len(rows)] if "_proj" not in name else tensor, rows), name
        found += names
    assert sorted(found) == sorted(expected)
