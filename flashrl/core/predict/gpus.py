"""Data sheets of the GPUs that rollouts run on: what :mod:`flashrl.core.predict` divides by.

Every figure is the vendor's own for the SXM or PCIe board named, without structured sparsity (the
sheets print the sparse figure, twice the dense one):

- A100 80GB SXM: NVIDIA A100 Tensor Core GPU data sheet (2021).
- H100 SXM: NVIDIA H100 Tensor Core GPU data sheet (2023).
- H200 SXM: NVIDIA H200 Tensor Core GPU data sheet (2024).
- L40S: NVIDIA L40S data sheet (2023); PCIe Gen4 x16 is its only link.
- B200: NVIDIA Blackwell data sheet (2024), HGX B200 board at 1,000 W, an eighth of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from flashrl.core.schemes import QuantScheme
from flashrl.errors import UnknownNameError, UnsupportedError

__all__ = ["GPU", "GPUS", "get_gpu"]


@attrs.frozen(kw_only=True)
class GPU:
    """One GPU, as its data sheet has it.

    Args:
        name: Short name, such as ``"h200"``.
        board: The board that the figures are for.
        memory_gb: Memory in the vendor's gigabytes, which are 2**30 bytes.
        bandwidth_gb_s: Memory bandwidth, 1e9 bytes a second.
        bf16_tflops: Dense BF16 rate, 1e12 operations a second.
        int8_tflops: Dense INT8 rate, or None without INT8 units.
        fp8_tflops: Dense FP8 rate, or None without FP8 units.
        link_gb_s: Bandwidth to the other GPUs of the host, one direction, 1e9 bytes a second.
        cautions: What to know before a scheme's type (``"int"``, ``"float"``) is used here.
    """

    name: str
    board: str
    memory_gb: float
    bandwidth_gb_s: float
    bf16_tflops: float
    int8_tflops: float | None
    fp8_tflops: float | None
    link_gb_s: float
    cautions: Mapping[str, str] = MappingProxyType({})

    def matmul_tflops(self, scheme: QuantScheme) -> float:
        """Dense rate at which the scheme's linear layers multiply, 1e12 operations a second.

        Raises:
            UnsupportedError: The GPU has no units for the scheme's type.

        Example:
            >>> from flashrl.core.schemes import get_scheme
            >>> get_gpu("h200").matmul_tflops(get_scheme("int8"))
            1979.0
        """
        if not scheme.quantized:
            return self.bf16_tflops
        rate = self.int8_tflops if scheme.type == "int" else self.fp8_tflops
        if rate is None:
            kind, other = ("int8", "fp8") if scheme.type == "int" else ("fp8", "int8")
            raise UnsupportedError(
                f"the {self.board} has no {kind} units, so it would multiply in 16 bit; use {other}"
            )
        return rate


GPUS: Mapping[str, GPU] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            GPU(
                name="a100",
                board="A100 80GB SXM",
                memory_gb=80,
                bandwidth_gb_s=2039,
                bf16_tflops=312,
                int8_tflops=624,
                fp8_tflops=None,
                link_gb_s=300,
            ),
            GPU(
                name="h100",
                board="H100 80GB SXM",
                memory_gb=80,
                bandwidth_gb_s=3350,
                bf16_tflops=989.5,
                int8_tflops=1979.0,
                fp8_tflops=1979.0,
                link_gb_s=450,
            ),
            GPU(
                name="h200",
                board="H200 141GB SXM",
                memory_gb=141,
                bandwidth_gb_s=4800,
                bf16_tflops=989.5,
                int8_tflops=1979.0,
                fp8_tflops=1979.0,
                link_gb_s=450,
            ),
            GPU(
                name="l40s",
                board="L40S 48GB PCIe",
                memory_gb=48,
                bandwidth_gb_s=864,
                bf16_tflops=362.05,
                int8_tflops=733.0,
                fp8_tflops=733.0,
                link_gb_s=32,
            ),
            GPU(
                name="b200",
                board="B200 180GB SXM",
                memory_gb=180,
                bandwidth_gb_s=7700,
                bf16_tflops=2250.0,
                int8_tflops=4500.0,
                fp8_tflops=4500.0,
                link_gb_s=900,
                # The next board, B300, has hardly any int8 units left: 0.15e15 operations a second.
                cautions=MappingProxyType(
                    {
                        "int": "the int8 rate of the data sheet may not be reached: vLLM's CUTLASS "
                        "int8 kernels stop at compute capability 9.0 (vllm#25935); prefer fp8"
                    }
                ),
            ),
        )
    }
)
"""The GPUs whose data sheets are known, by short name."""


def get_gpu(gpu: str | GPU) -> GPU:
    """Look a data sheet up; one passes through.

    Args:
        gpu: A short name, or a product name that holds it as a word, such as ``nvidia-smi``
            prints; case does not matter.

    Returns:
        The data sheet.

    Raises:
        UnknownNameError: No such data sheet; the message lists all.

    Example:
        >>> get_gpu("NVIDIA H100 80GB HBM3").name
        'h100'
    """
    if isinstance(gpu, GPU):
        return gpu
    words = re.split(r"[\s_-]+", gpu.strip().lower())
    for name, found in GPUS.items():
        if name in words:
            return found
    close = difflib.get_close_matches(gpu.strip().lower(), GPUS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UnknownNameError(
        f"no data sheet of GPU {gpu!r}{hint}; known: {', '.join(GPUS)}. "
        "For another, pass a flashrl.core.predict.gpus.GPU"
    )
