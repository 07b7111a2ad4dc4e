"""The report of an experiment: arms, conditions and seeds, on records whose numbers are known."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

stats: Any = pytest.importorskip("scipy.stats")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from click.testing import CliRunner  # noqa: E402

from flashrl.cli import main  # noqa: E402
from flashrl.report import RunWriter, read_runs, summarize, write_report  # noqa: E402
from flashrl.report.comparison import compare_groups  # noqa: E402
from flashrl.report.curves import compute_band  # noqa: E402
from flashrl.report.records import Histogram  # noqa: E402
from flashrl.report.timing import mean_seconds  # noqa: E402

ARMS = {"int8_tis": ["bf16", "int8"], "int8": ["bf16"], "bf16": []}
FINAL = {  # condition, arm → what each seed ends with
    ("easy", "bf16"): [0.80, 0.82, 0.84, 0.81],
    ("easy", "int8"): [0.81, 0.81, 0.85, 0.80],
    ("easy", "int8_tis"): [0.79, 0.83, 0.84, 0.81],
    ("hard", "bf16"): [0.70, 0.74, 0.72, 0.71],
    ("hard", "int8"): [0.40, 0.43, 0.43, 0.41],
    ("hard", "int8_tis"): [0.69, 0.74, 0.73, 0.70],
}
NUM_STEPS = 8


def write_run(folder: Path, condition: str, arm: str, seed: int, **extra: Any) -> None:
    facts = {
        "arm": arm,
        "arm_title": arm.upper(),
        "baselines": ARMS[arm],
        "condition": condition,
        "condition_title": condition.title(),
        "seed": seed,
        "num_steps": NUM_STEPS,
        **extra,
    }
    order = ["easy", "hard"].index(condition)
    final = FINAL[condition, arm][seed]
    with RunWriter(folder, f"{condition}.{arm}.{seed}", order=order, **facts) as writer:
        writer.step({"step": 0, "accuracy": 0.0})
        for step in range(1, NUM_STEPS + 1):
            # The last quarter: steps 7 and 8, which lie around the final value.
            accuracy = {6: 9.9, 7: final - 0.1, 8: final + 0.1}.get(step)
            writer.step(
                {
                    "step": step,
                    "seconds": 0.5,
                    "reward": step + seed,
                    "flashrl/kl": 0.001 * (seed + 1),
                    **({} if accuracy is None else {"accuracy": accuracy}),
                }
            )
            if step in (1, 4, 8):
                writer.histogram(Histogram(step=step, edges=[-1.0, 0.0, 1.0], counts=[step, 3]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    for condition, arm in FINAL:
        for seed in range(4):
            write_run(folder, condition, arm, seed)
    return folder


def test_outcome_is_the_mean_of_the_last_quarter_over_the_seeds(folder: Path) -> None:
    comparison = compare_groups(read_runs(folder))
    for outcome in comparison.outcomes:
        values = FINAL[outcome.group.condition, outcome.group.arm]
        assert outcome.final is not None
        assert outcome.final.mean == pytest.approx(statistics.fmean(values))
        expected = stats.t.interval(0.95, 3, loc=statistics.fmean(values), scale=stats.sem(values))
        assert (outcome.final.low, outcome.final.high) == pytest.approx(expected)


def test_tests_are_paired_by_seed_and_corrected_all_together(folder: Path) -> None:
    comparison = compare_groups(read_runs(folder))
    raw = {}
    for condition in ("easy", "hard"):
        for arm, others in ARMS.items():
            for other in others:
                pair = FINAL[condition, arm], FINAL[condition, other]
                raw[condition, arm, other] = float(stats.ttest_rel(*pair).pvalue)
    found = {(t.group.condition, t.group.arm, t.baseline.arm): t for t in comparison.tests}
    assert found.keys() == raw.keys()
    largest = 0.0
    for rank, key in enumerate(sorted(raw, key=lambda key: raw[key])):  # Holm, step by step
        largest = max(largest, min(1.0, raw[key] * (len(raw) - rank)))
        assert found[key].difference.p == pytest.approx(raw[key])
        assert found[key].adjusted_p == pytest.approx(largest)
    decided = {key for key, test in found.items() if test.decided}
    assert decided == {("hard", "int8", "bf16"), ("hard", "int8_tis", "int8")}


def test_what_others_are_compared_with_comes_first(folder: Path) -> None:
    groups = compare_groups(read_runs(folder)).groups
    assert [group.condition for group in groups] == ["easy"] * 3 + ["hard"] * 3
    assert [group.arm for group in groups[:3]] == ["bf16", "int8", "int8_tis"]


def test_findings_claim_what_the_tests_allow(folder: Path) -> None:
    findings = {f["headline"]: f["text"] for f in summarize(read_runs(folder))["findings"]}
    assert "Easy: no arm was shown to end elsewhere than BF16." in findings
    assert "Hard: INT8 ended below BF16." in findings
    assert "−0.300 ± " in findings["Hard: INT8 ended below BF16."]  # noqa: RUF001
    changed = "What was done about 8 bit changed the outcome in 1 of 2 comparisons."
    assert "INT8_TIS +0.297" in findings[changed]
    room = findings["Easy: no arm was shown to end elsewhere than BF16."]
    differences = [a - b for a, b in zip(FINAL["easy", "int8"], FINAL["easy", "bf16"], strict=True)]
    low = stats.ttest_1samp(differences, 0).confidence_interval(0.95).low
    assert f"loss of up to {-low:.3f} (INT8, 4 seeds)" in room


def test_unfinished_runs_count_in_no_test(tmp_path: Path) -> None:
    for arm in ("bf16", "int8"):
        for seed in range(3):
            write_run(tmp_path, "easy", arm, seed)
    path = tmp_path / "run-easy.int8.2.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")  # cut off at the end
    comparison = compare_groups(read_runs(tmp_path))
    [test] = comparison.tests
    assert test.difference.num == 2
    findings = summarize(read_runs(tmp_path))["findings"]
    assert findings[0]["headline"] == "This report is partial: 5 of 6 runs are finished."
    assert "1 cut off" in findings[0]["text"]


def test_one_seed_is_drawn_and_not_tested(tmp_path: Path) -> None:
    for arm in ("bf16", "int8"):
        write_run(tmp_path, "easy", arm, 0)
    runs = read_runs(tmp_path)
    [test] = compare_groups(runs).tests
    assert (test.adjusted_p, test.decided) == (None, False)
    page = write_report(runs, tmp_path).read_text(encoding="utf-8")
    assert "0.800" in page
    assert not (tmp_path / "differences.png").exists()


def test_without_held_out_problems_the_reward_judges(tmp_path: Path) -> None:
    for seed in range(2):
        facts = {"arm": "bf16", "condition": "c", "seed": seed}
        with RunWriter(tmp_path, f"r{seed}", **facts) as writer:
            writer.step({"step": 1, "reward": 0.25 + seed})
    comparison = compare_groups(read_runs(tmp_path))
    assert comparison.metric == "reward"
    [outcome] = comparison.outcomes
    assert outcome.final is not None
    assert outcome.final.mean == 0.75


def test_band_is_mean_lowest_and_highest_of_the_runs(folder: Path) -> None:
    runs = [run for run in read_runs(folder) if run.name.startswith("easy.bf16")]
    band = compute_band(runs, "reward", smooth=False)
    assert list(band.steps) == list(range(1, NUM_STEPS + 1))
    assert list(band.low) == [float(step) for step in band.steps]
    assert list(band.high) == [step + 3.0 for step in band.steps]
    assert list(band.mean) == [step + 1.5 for step in band.steps]
    smooth = compute_band(runs, "reward", smooth=True)
    assert smooth.low[-1] == statistics.fmean([4, 5, 6, 7, 8])  # each run over five steps


def test_long_curves_are_thinned_to_their_last_step(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "a", arm="a", condition="c", seed=0) as writer:
        for step in range(1, 302):
            writer.step({"step": step, "reward": float(step)})
    band = compute_band(read_runs(tmp_path), "reward", smooth=False)
    assert len(band.steps) <= 60
    assert band.steps[-1] == 301
    assert list(band.mean) == list(map(float, band.steps))


def test_time_that_several_steps_share_is_spread_over_them(tmp_path: Path) -> None:
    """Four steps of a second, one rollout of two seconds for all of them: half a second each."""
    with RunWriter(tmp_path, "a") as writer:
        for step in range(1, 5):
            rollout = {"flashrl/generate_ms": 2000.0} if step == 1 else {}
            writer.step({"step": step, "seconds": 1.0, **rollout})
    [run] = read_runs(tmp_path)
    assert mean_seconds(run)["generate"] == 0.5
    assert mean_seconds(run)["train"] == 0.5


def test_page_shows_every_condition_and_needs_nothing_else(folder: Path, tmp_path: Path) -> None:
    page = write_report(read_runs(folder), tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "http" not in page
    for text in ("<h2>Easy</h2>", "<h2>Hard</h2>", "final accuracy", "less BF16", "0.718 ± "):
        assert text in page
    names = {path.stem for path in tmp_path.glob("*.png")}
    each = {"accuracy", "reward", "kl", "histograms", "time"}
    assert names == {"differences"} | {f"{c}-{name}" for c in ("easy", "hard") for name in each}


def test_command_prints_a_table_a_condition_and_all_numbers_as_json(
    folder: Path, tmp_path: Path
) -> None:
    arguments = ["report", str(folder), "--output", str(tmp_path)]
    shown = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "Easy" in shown.stdout
    assert "0.718 ± 0.027" in shown.stdout  # 0.70, 0.74, 0.72, 0.71: s = 0.0171, t = 3.182
    data = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert len(data["comparison"]["tests"]) == 6
    assert data["comparison"]["metric"] == "accuracy"


def test_compressed_records_read_alike(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("run-*.jsonl"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_runs(tmp_path) == read_runs(folder)
