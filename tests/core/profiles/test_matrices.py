"""A weight read by rows is the weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.core.profiles.matrices import read_matrix
from flashrl.core.schemes import get_scheme
from flashrl.errors import UnknownNameError

ROWS, COLUMNS = 200, 150  # ragged blocks


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    q = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
    save_file({"q.weight": q, "w.weight": torch.randn(ROWS, COLUMNS)}, tmp_path / "m.safetensors")
    return Checkpoint.open(tmp_path)


@pytest.fixture(params=[0, 1 << 24], ids=["on disk", "in memory"])
def _large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrl.core.profiles.matrices.LARGE", request.param)


SLICES = [slice(None), slice(0, 1), slice(100, 140), slice(127, 129), slice(190, 500)]


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("scheme", ["int8", "fp8_tensor", "fp8_block"])
def test_rows_are_those_of_the_dequantized_weight(checkpoint: Checkpoint, scheme: str) -> None:
    preset = get_scheme(scheme)
    scale = torch.rand(preset.scale_shape((ROWS, COLUMNS))) + 0.5
    q = dict(checkpoint)["q.weight"]
    expected = torch.empty(ROWS, COLUMNS)
    for i in range(ROWS):
        for j in range(COLUMNS):
            block = {"int8": (i, 0), "fp8_tensor": (0,), "fp8_block": (i // 128, j // 128)}[scheme]
            expected[i, j] = float(q[i, j]) * float(scale[block])
    matrix = read_matrix(checkpoint, "q.weight", scale=scale, scheme=preset)
    assert tuple(matrix.shape) == (ROWS, COLUMNS)
    for rows in SLICES:
        assert torch.allclose(matrix[rows], expected[rows])


@pytest.mark.usefixtures("_large")
def test_a_weight_without_a_scale_is_as_it_is(checkpoint: Checkpoint) -> None:
    matrix = read_matrix(checkpoint, "module.w.weight")
    for rows in SLICES:
        assert torch.equal(matrix[rows], dict(checkpoint)["w.weight"][rows])


def test_an_unknown_name_is_an_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnknownNameError, match=r"x\.weight"):
        read_matrix(checkpoint, "x.weight")
