"""What 8-bit rollouts will bring on a given GPU, before anyone rents it.

:func:`predict` sets a scheme against 16 bit by the roofline of
:mod:`flashrl.core.predict.roofline`, which says what it assumes and how well it was met;
:func:`compute_step_speedup` is Amdahl's law for a step of training, much of which is something
else.
"""

from __future__ import annotations

from flashrl.core.predict.speedup import (
    GPU,
    ModelShape,
    Prediction,
    TimeSplit,
    Workload,
    compute_step_speedup,
    predict,
)

__all__ = [
    "GPU",
    "ModelShape",
    "Prediction",
    "TimeSplit",
    "Workload",
    "compute_step_speedup",
    "predict",
]
