"""What calibration learned about a model: smoothing factors, and scales that stay fixed.

A profile outlives the weights it came from: smoothing is applied anew to every tensor a trainer
pushes, and static scales, where a scheme wants them, stay as they were.  It is kept as safetensors
with its facts in the metadata; :mod:`flashrl.core.profiles.pt` reads and writes the format of
flash-llm-rl.
"""

from __future__ import annotations

from flashrl.core.profiles.profile import FORMAT_VERSION, Profile

__all__ = ["FORMAT_VERSION", "Profile"]
