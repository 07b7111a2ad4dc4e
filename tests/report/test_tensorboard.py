"""Runs that TensorBoard's own writer wrote, under trainers' names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from flashrl.errors import MissingDependencyError
from flashrl.report import read_runs, summarize, write_report

pytest.importorskip("tensorboard")

VERL = {
    "critic/score/mean": 0.5,
    "timing_s/step": 8.0,
    "timing_s/gen": 3.0,
    "timing_s/old_log_prob": 1.5,
    "timing_s/update_weights": 0.25,
    "flashrl/kl": 0.01,
    "flashrl/ratio_max": 3.0,
    "flashrl/scheme/int8": 1.0,
}
OPENRLHF = {
    "train/reward": 0.5,
    "train/timing/step_total": 8.0,
    "train/timing/generation": 3.0,
    "train/timing/broadcast": 0.25,
    "train/flashrl/kl": 0.01,
    "train/flashrl/ratio_max": 3.0,
    "train/flashrl/scheme/int8": 1.0,
}
TRL = {
    "train/reward": 0.5,
    "train/step_time": 8.0,
    "train/flashrl/generate_ms": 3000.0,
    "train/flashrl/update_ms": 250.0,
    "train/flashrl/kl": 0.01,
    "train/flashrl/ratio_max": 3.0,
    "train/flashrl/scheme/int8": 1.0,
}


def log(folder: Path, metrics: Mapping[str, float], *, steps: int = 4, **options: bool) -> None:
    """Log metrics that double from step to step, except for times."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(folder)) as writer:
        for step in range(1, steps + 1):
            for name, value in metrics.items():
                constant = "_ms" in name or "tim" in name or "scheme" in name
                scaled = value if constant else value * 2 ** (step - 1)
                writer.add_scalar(name, scaled, step, **options)


@pytest.mark.parametrize("new_style", [False, True])
@pytest.mark.parametrize("metrics", [VERL, OPENRLHF, TRL], ids=["verl", "openrlhf", "trl"])
def test_numbers_of_each_trainer(
    tmp_path: Path, metrics: Mapping[str, float], new_style: bool
) -> None:
    log(tmp_path / "int8", metrics, new_style=new_style)
    [run] = read_runs(tmp_path)
    assert run.name == "int8"
    assert run.series("reward") == ([1, 2, 3, 4], [0.5, 1.0, 2.0, 4.0])
    [summary] = summarize([run])["runs"]
    assert summary["scheme"] == "int8"
    assert summary["kl"] == pytest.approx(0.01 * (1 + 2 + 4 + 8) / 4)
    assert summary["ratio_max"] == pytest.approx(3.0 * 8)
    assert summary["reward_end"] == 4.0
    seconds = summary["seconds_per_step"]
    assert (seconds["total"], seconds["generate"], seconds["sync"]) == (8.0, 3.0, 0.25)


def test_a_run_for_each_folder_and_a_page_of_them(tmp_path: Path) -> None:
    for name in ("a/bf16", "a/int8", "b"):
        log(tmp_path / name, TRL)
    runs = read_runs(tmp_path)
    assert [(run.name, run.title) for run in runs] == [
        ("a-bf16", "a/bf16"),
        ("a-int8", "a/int8"),
        ("b", "b"),
    ]
    pytest.importorskip("matplotlib")
    text = write_report(runs, tmp_path / "page").read_text(encoding="utf-8")
    assert all(run.title in text for run in runs)
    assert "partial" not in text  # event files do not say how a run ended
    assert (tmp_path / "page" / "kl.png").stat().st_size > 0


def test_a_run_continued_in_a_second_file_is_one(tmp_path: Path) -> None:
    log(tmp_path, {"train/reward": 1.0}, steps=2)
    log(tmp_path, {"train/reward": 8.0}, steps=3)
    [run] = read_runs(tmp_path)
    assert run.name == tmp_path.name
    assert run.series("reward") == ([1, 2, 3], [8.0, 16.0, 32.0])


def test_a_file_cut_off_in_an_event_reads_up_to_there(tmp_path: Path) -> None:
    log(tmp_path, {"train/reward": 1.0})
    [path] = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-5])
    [run] = read_runs(tmp_path)
    assert run.series("reward") == ([1, 2, 3], [1.0, 2.0, 4.0])


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(tmp_path, TRL)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing", None)
    for name in list(sys.modules):
        if name.startswith("tensorboard.backend.event_processing."):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"flashrl\[report\]"):
        read_runs(tmp_path)
