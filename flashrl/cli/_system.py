"""What this machine has, found out without importing any framework."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import attrs

__all__ = ["InstalledGPU", "find_cpu_int8", "find_gpus"]

_QUERY = "name,memory.total,compute_cap,driver_version"
_INT8_FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni", "asimddp")


@attrs.frozen(kw_only=True)
class InstalledGPU:
    """A GPU as ``nvidia-smi`` describes it.

    Args:
        name: Product name.
        memory_gb: Memory, 2**30 bytes.
        compute_capability: Such as ``"9.0"``.
        driver: Version of the driver.
    """

    name: str
    memory_gb: float
    compute_capability: str
    driver: str


def find_gpus() -> tuple[list[InstalledGPU], str]:
    """The GPUs of this machine, and why there are none if so."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "nvidia-smi is not installed"
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(  # noqa: S603 - a fixed command line
            command, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi failed: {error}"
    if found.returncode != 0:
        message = " ".join((found.stdout + found.stderr).split())
        return [], f"nvidia-smi failed: {message or f'exit code {found.returncode}'}"
    gpus = []
    for line in found.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[1].isdigit():
            name, memory, capability, driver = fields
            gpus.append(
                InstalledGPU(
                    name=name,
                    memory_gb=round(int(memory) / 1024, 1),
                    compute_capability=capability,
                    driver=driver,
                )
            )
    return gpus, "" if gpus else "nvidia-smi lists none"


def find_cpu_int8(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The CPU's instruction for int8 dot products, ``""`` for none, None if that is unknown."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags: set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags.update(value.split())
    return next((flag for flag in _INT8_FLAGS if flag in flags), "" if flags else None)
