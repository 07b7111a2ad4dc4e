"""The README's example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import flashrl
from flashrl.core import correction
from flashrl.core.log_probs import compute_log_probs
from flashrl.core.rollouts import Rollout, SamplingParams
from flashrl.testing import make_checkpoint

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", dtype=torch.float32)

    def old_log_probs(model: Any, rollout: Rollout) -> torch.Tensor:
        ids = torch.cat([torch.tensor([[5, 9, 17]]), rollout.response_ids], dim=1)
        with torch.no_grad():
            logits = model(ids).logits[:, 2:-1]
        return compute_log_probs(
            logits, rollout.response_ids, params=SamplingParams(temperature=0.8)
        ).log_probs

    names: dict[str, Any] = {
        "flashrl": flashrl,
        "correction": correction,
        "SamplingParams": SamplingParams,
        "engine": AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32),
        "model": checkpoint.model,
        "old_log_probs": old_log_probs,
    }
    exec(example, names)  # noqa: S102  # our own README
    rollout, weights, metrics = names["rollout"], names["weights"], names["metrics"]
    assert rollout.version == 1
    assert weights.shape == rollout.response_ids.shape == (1, rollout.response_ids.shape[1])
    assert bool(((weights > 0) == (rollout.response_mask == 1)).all())
    assert 0 < metrics["k3"] < 0.2
