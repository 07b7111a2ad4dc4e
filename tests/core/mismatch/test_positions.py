"""The mismatch by position, against a loop."""

from __future__ import annotations

import math

import pytest
import torch

from flashrl.core.mismatch import measure, measure_positions
from flashrl.errors import ShapeError


def batch(rows: int = 7, columns: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rollout = -3 * torch.rand(rows, columns, generator=generator) - 0.5
    old = rollout + 0.2 * torch.randn(rows, columns, generator=generator)
    lengths = torch.randint(1, columns - 1, (rows, 1), generator=generator)
    mask = (torch.arange(columns) < lengths).float()
    return {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}


def test_it_is_the_mean_over_the_responses_that_reach_there() -> None:
    data = batch()
    found = measure_positions(**data).tolist()
    for column, value in enumerate(found):
        terms = [
            math.exp(pi - mu) - 1 - (pi - mu)
            for pi, mu, counts in zip(
                *(data[name][:, column].double().tolist() for name in data), strict=True
            )
            if counts
        ]
        assert math.isnan(value) if not terms else value == pytest.approx(sum(terms) / len(terms))
    assert math.isnan(found[-1])


@pytest.mark.parametrize("start", [1, 5, 11])
def test_a_step_shows_where_it_is(start: int) -> None:
    """sglang#25790, vllm#54035: an FP8 KV cache is off from some position on."""
    old = torch.full((16, 12), -1.5)
    rollout = old.clone()
    rollout[:, start:] -= 0.3
    found = measure_positions(
        old_log_probs=old, rollout_log_probs=rollout, response_mask=torch.ones(16, 12)
    )
    assert torch.equal(found[:start], torch.zeros(start, dtype=torch.float64))
    assert torch.allclose(
        found[start:], torch.tensor(math.exp(0.3) - 1.3, dtype=torch.float64), rtol=1e-5
    )


def test_weighted_by_tokens_it_is_the_batchs_k3() -> None:
    data = batch()
    counts = data["response_mask"].sum(0).double()
    by_position = measure_positions(**data).nan_to_num(0.0)
    k3 = measure(**data).compute()["k3"]
    assert float((by_position * counts).sum() / counts.sum()) == pytest.approx(k3, rel=1e-5)


def test_masked_and_unusable_values_do_not_count() -> None:
    data = batch()
    expected = measure_positions(**data)
    data["rollout_log_probs"] = data["rollout_log_probs"].masked_fill(
        data["response_mask"] == 0, math.nan
    )
    assert torch.allclose(measure_positions(**data), expected, equal_nan=True)
    data["old_log_probs"][0, 0] = math.nan
    without = {name: tensor[1:] for name, tensor in data.items()}
    assert measure_positions(**data)[0] == measure_positions(**without)[0]


def test_log_mass_is_added_to_the_rollouts() -> None:
    data = batch()
    mass = torch.full_like(data["old_log_probs"], -0.25)
    shifted = data | {"rollout_log_probs": data["rollout_log_probs"] + mass}
    assert torch.allclose(
        measure_positions(**data, log_mass=mass), measure_positions(**shifted), equal_nan=True
    )


def test_shapes_must_agree() -> None:
    data = batch()
    data["old_log_probs"] = data["old_log_probs"][:, :1]
    with pytest.raises(ShapeError, match="old_log_probs"):
        measure_positions(**data)
