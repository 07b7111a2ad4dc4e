"""A scheme against 16 bit by the roofline, and a step of training by Amdahl's law."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import attrs

from flashrl.core.predict.gpus import GPU, get_gpu
from flashrl.core.predict.roofline import Roofline, TimeSplit, Workload
from flashrl.core.predict.shapes import ModelShape
from flashrl.core.schemes import PRESETS, QuantScheme, get_scheme
from flashrl.errors import ConfigError

__all__ = [
    "GPU",
    "ModelShape",
    "Prediction",
    "TimeSplit",
    "Workload",
    "compute_step_speedup",
    "predict",
]


@attrs.frozen(kw_only=True)
class Prediction:
    """What one scheme brings.

    Args:
        scheme: Its name.
        kv_cache: ``"fp8"``, or None for 16 bit.
        time: Seconds to generate the whole batch, by what they are spent on.
        decode_step: Seconds of one decode step in the middle of the responses.
        tokens_per_second: Response tokens, all GPUs of the engine together.
        weight_bytes: Weights on one GPU.
        memory_saved_bytes: Against 16 bit, on one GPU.
        max_sequences: Whole sequences that fit beside the weights.
        num_running: Sequences generated at a time: the batch, or as many as fit.
        rollout_speedup: Against 16 bit, or None where 16-bit weights do not fit at all.
        update_seconds: To load one set of BF16 weights that are already on the GPU.
        step_speedup: Of a whole training step, with ``update_seconds`` as an extra cost; or None.
        cautions: What the figures do not say.
    """

    scheme: str
    kv_cache: str | None
    time: TimeSplit
    decode_step: TimeSplit
    tokens_per_second: float
    weight_bytes: float
    memory_saved_bytes: float
    max_sequences: int
    num_running: int
    rollout_speedup: float | None
    update_seconds: float
    step_speedup: float | None
    cautions: tuple[str, ...] = ()

    @property
    def bound_by(self) -> str:
        """What takes most of the time: a field of :class:`TimeSplit`."""
        return self.time.largest


def compute_step_speedup(
    rollout_speedup: float, *, generation_share: float = 0.7, sync_share: float = 0.0
) -> float:
    """How much faster a whole training step is, by Amdahl's law.

    ``1 / (1 - g + g / s + c)`` with g the share of generation, s its speed-up and c the extra cost
    of synchronising quantized weights (Amdahl, "Validity of the single processor approach", 1967).

    Args:
        rollout_speedup: How many times faster generation is.
        generation_share: Fraction of the 16-bit step that generation takes.
        sync_share: Extra cost, as a fraction of the 16-bit step.

    Returns:
        Time of the 16-bit step over time of the new one; under 1 when it is slower.

    Raises:
        ConfigError: A value is outside its range.

    Example:
        >>> round(compute_step_speedup(1.7, generation_share=0.7), 3)
        1.405
    """
    if not (
        0 < rollout_speedup < math.inf and 0 <= generation_share <= 1 and 0 <= sync_share < math.inf
    ):
        raise ConfigError(
            f"rollout_speedup is {rollout_speedup} and must be positive, generation_share is "
            f"{generation_share} and must be from 0 to 1, sync_share is {sync_share} and must not "
            "be negative"
        )
    return 1 / (1 - generation_share + generation_share / rollout_speedup + sync_share)


def predict(
    model: ModelShape | Mapping[str, Any] | str | os.PathLike[str],
    *,
    gpu: str | GPU,
    scheme: str | QuantScheme = "int8",
    workload: Workload | None = None,
) -> Prediction:
    """Predict generation under a scheme, against 16 bit.

    Args:
        model: Whatever :meth:`ModelShape.from_config` takes.
        gpu: A name that :func:`flashrl.core.predict.gpus.get_gpu` knows, or a data sheet.
        scheme: A preset's name or a scheme; ``kv_cache="fp8"`` counts.
        workload: What is generated; 256 sequences of 512 + 2048 tokens by default.

    Returns:
        The prediction.

    Raises:
        UnknownNameError: No such GPU or scheme.
        ConfigError: The model's configuration has no sizes to work with.
        UnsupportedError: The GPU cannot multiply in the scheme's type, the model's heads do not
            divide among the GPUs, or not even one sequence fits.

    Example:
        >>> found = predict("qwen2.5-32b", gpu="h200", scheme="int8")
        >>> found.bound_by, found.rollout_speedup > 1.3
        ('kv_cache', True)
    """
    roofline = Roofline(
        model=ModelShape.from_config(model),
        gpu=get_gpu(gpu),
        scheme=get_scheme(scheme),
        workload=workload or Workload(),
    )
    roofline.check()
    baseline = attrs.evolve(roofline, scheme=PRESETS["bf16"])
    load, time, update_seconds = roofline.workload, roofline.generation(), roofline.update_seconds()
    cautions = roofline.cautions()
    rollout_speedup = step_speedup = None
    if baseline.max_sequences() >= 1:
        in_16_bit = baseline.generation().total
        rollout_speedup = in_16_bit / time.total
        step_in_16_bit = in_16_bit / load.generation_share
        step_speedup = compute_step_speedup(
            rollout_speedup,
            generation_share=load.generation_share,
            sync_share=update_seconds / step_in_16_bit if roofline.scheme.quantized else 0.0,
        )
    else:
        cautions += ("16-bit weights do not fit, so there is no speed-up to state",)
    return Prediction(
        scheme=roofline.scheme.name,
        kv_cache=roofline.scheme.kv_cache,
        time=time,
        decode_step=roofline.decode_step(),
        tokens_per_second=load.batch * load.response_length / time.total,
        weight_bytes=roofline.weight_bytes(),
        memory_saved_bytes=baseline.weight_bytes() - roofline.weight_bytes(),
        max_sequences=roofline.max_sequences(),
        num_running=roofline.num_running(),
        rollout_speedup=rollout_speedup,
        update_seconds=update_seconds,
        step_speedup=step_speedup,
        cautions=cautions,
    )
