"""What the machine has, read from a program and a file that say something known."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrl.cli._system import InstalledGPU, find_cpu_int8, find_gpus


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    return program


def test_gpus_are_read(nvidia_smi: Path) -> None:
    nvidia_smi.write_text(
        "#!/bin/sh\n"
        "echo 'NVIDIA H200, 143771, 9.0, 570.86.15'\n"
        "echo 'NVIDIA H100 80GB HBM3, 81559, 9.0, 570.86.15'\n"
    )
    assert find_gpus() == (
        [
            InstalledGPU(
                name="NVIDIA H200", memory_gb=140.4, compute_capability="9.0", driver="570.86.15"
            ),
            InstalledGPU(
                name="NVIDIA H100 80GB HBM3",
                memory_gb=79.6,
                compute_capability="9.0",
                driver="570.86.15",
            ),
        ],
        "",
    )


def test_a_driver_that_does_not_answer_is_a_reason(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert find_gpus() == ([], "nvidia-smi failed: NVIDIA-SMI has failed")
    nvidia_smi.write_text("#!/bin/sh\nexit 3\n")
    assert find_gpus() == ([], "nvidia-smi failed: exit code 3")
    nvidia_smi.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert find_gpus() == ([], "nvidia-smi lists none")
    nvidia_smi.write_text("no program at all")
    assert find_gpus()[1].startswith("nvidia-smi failed: ")


def test_no_driver_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ([], "nvidia-smi is not installed")


@pytest.mark.parametrize(
    ("content", "instruction"),
    [
        ("flags\t: fpu sse avx2 avx512_vnni amx_int8\n", "amx_int8"),
        ("processor: 0\nflags : avx avx2\n", ""),
        ("Features : fp asimd asimddp\n", "asimddp"),
        ("nothing here\n", None),
    ],
)
def test_cpu_instructions_are_read(content: str, instruction: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(content)
    assert find_cpu_int8(file) == instruction


def test_a_system_without_cpuinfo_is_unknown(tmp_path: Path) -> None:
    assert find_cpu_int8(tmp_path / "none") is None
