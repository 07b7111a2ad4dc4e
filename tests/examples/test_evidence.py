"""The evidence experiment: what it asks and records, and that nothing is lost or done twice."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flashrl.errors import ConfigError
from flashrl.report.records import Run, read_run

# TRL 1.16 uses names that newer transformers deprecate, and DeepSpeed such of torch's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

SWEEP = ["--out", "out", "--arms", "int8_moving.yaml", "broken.yaml", "--conditions", "plain.yaml"]
SWEEP += ["--seeds", "1", "--jobs", "2", "--minutes", "15", "--save-every", "100"]
NAME = "plain.int8_moving.seed0"
NUM_STEPS = 16
WEIGHT = "model.layers.0.mlp.down_proj.weight"

Start = Callable[..., Popen[str]]


def numbers(run: Run) -> list[int]:
    return [step["step"] for step in run.steps]


def wait_for_step(path: Path, step: int, *, within: float = 600) -> None:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if path.is_file() and f'"step": {step}}}' in path.read_text():
            return
        time.sleep(0.02)
    pytest.fail(f"{path} never came to step {step}")


@pytest.fixture(scope="module")
def interrupted(workplace: Path, start: Start) -> tuple[int, Run, dict[str, torch.Tensor]]:
    """A sweep that was told to stop in the middle: its code, its record, its checkpoint.

    Then what a process writes that is killed before its next checkpoint is added by hand.
    """
    sweep = start("first", "sweep.py", SWEEP)
    path = workplace / "out" / f"run-{NAME}.jsonl"
    try:
        wait_for_step(path, 2)
    finally:
        sweep.terminate()
        sweep.communicate()
    run = read_run(path)
    [checkpoint] = (workplace / "out" / "work" / NAME).glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{numbers(run)[-1]}"
    weights = load_file(checkpoint / "model.safetensors")
    lines = path.read_text().splitlines()[:-1]
    lost = json.dumps({"kind": "step", "step": numbers(run)[-1] + 1, "reward": 99.0})
    path.write_text("\n".join([*lines, lost, '{"kind": "step", "st']))
    return sweep.returncode, run, weights


@pytest.fixture(scope="module")
def resumed(interrupted: Any, workplace: Path, start: Start) -> tuple[int, str, Run]:
    """The same sweep again, to its end."""
    sweep = start("second", "sweep.py", SWEEP)
    output, _ = sweep.communicate()
    run = read_run(workplace / "out" / f"run-{NAME}.jsonl")
    assert run.complete, (
        output + (workplace / "out" / "work" / NAME / "log.txt").read_text()[-4000:]
    )
    return sweep.returncode, output, run


def test_sweep_that_is_told_to_stop_leaves_a_checkpoint_of_its_last_step(interrupted: Any) -> None:
    code, run, _ = interrupted
    assert code == 1
    assert run.status == "interrupted"
    assert 2 <= numbers(run)[-1] < NUM_STEPS


def test_run_goes_on_from_there_with_each_step_once(interrupted: Any, resumed: Any) -> None:
    (_, before, _), (_, _, run) = interrupted, resumed
    assert numbers(run) == list(range(NUM_STEPS + 1))
    assert run.steps[: len(before.steps)] == before.steps
    assert 99.0 not in run.values("reward")


def test_what_was_learned_before_is_not_lost(
    interrupted: Any, resumed: Any, workplace: Path
) -> None:
    """What vLLM holds at the first sync of the second process is the checkpoint, quantized."""
    _, before, checkpoint = interrupted
    first, second = (
        [load_file(path) for path in sorted((workplace / name).glob("engine-*"))]
        for name in ("first", "second")
    )
    assert len(first) == numbers(before)[-1]
    assert len(first) + len(second) == NUM_STEPS
    expected = checkpoint[WEIGHT].float().abs().amax(dim=1) / 127
    torch.testing.assert_close(second[0][f"{WEIGHT}_scale"].flatten(), expected)
    assert second[0][WEIGHT].dtype == torch.int8
    for earlier, later in itertools.pairwise([*first, *second]):
        assert not torch.equal(earlier[f"{WEIGHT}_scale"], later[f"{WEIGHT}_scale"])


def test_recorded_numbers_are_those_of_the_batches(resumed: Any, workplace: Path) -> None:
    """Against what the loss got, step by step, in float64."""
    _, _, run = resumed
    batches = [
        load_file(path)
        for name in ("first", "second")
        for path in sorted((workplace / name).glob("loss-*"))
    ]
    histograms = {histogram.step: histogram for histogram in run.histograms}
    assert set(histograms) == {1, NUM_STEPS // 2 + 1, NUM_STEPS}
    for step, batch in enumerate(batches, start=1):
        mask = batch["completion_mask"].bool()
        old, rollout = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        log_ratio = (old.double() - rollout.double())[mask]
        record = run.steps[step]
        kl = float((log_ratio.exp() - 1 - log_ratio).mean())
        assert record["flashrl/kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert record["completions/mean_length"] == pytest.approx(float(mask.sum()) / 8)
        wanted = float(mask.sum()) / (record["flashrl/generate_ms"] / 1000)
        assert record["tokens_per_second"] == pytest.approx(wanted, rel=1e-3)
        if step in histograms:
            histogram = histograms[step]
            for low, high, count in zip(
                histogram.edges, histogram.edges[1:], histogram.counts, strict=False
            ):
                inside = (log_ratio >= low + 1e-6) & (log_ratio < high - 1e-6)
                assert int(inside.sum()) <= count
            assert sum(histogram.counts) == int(mask.sum())


def test_every_step_has_what_the_report_draws(resumed: Any) -> None:
    _, _, run = resumed
    for step in run.steps[1:]:
        for name in ("reward", "entropy", "grad_norm", "seconds", "tokens_per_second"):
            assert name in step
        for name in ("ess", "ratio_max", "frac_truncated", "generate_ms", "update_ms", "score_ms"):
            assert f"flashrl/{name}" in step
    evaluated = [step["step"] for step in run.steps if "accuracy" in step]
    assert evaluated == list(range(0, NUM_STEPS + 1, 2))
    assert "accuracy/two_step" in run.steps[0]


def test_run_that_fails_is_recorded_and_stops_no_other(resumed: Any, workplace: Path) -> None:
    code, output, _ = resumed
    assert code == 1
    assert "1 of 2 runs are done" in output
    failed = read_run(workplace / "out" / "run-plain.broken.seed0.jsonl")
    assert failed.status == "failed"
    assert "no_such_argument" in failed.end["error"]
    events = [json.loads(line) for line in (workplace / "out/sweep.jsonl").read_text().splitlines()]
    assert {"finished", "failed", "interrupted"} <= {event["event"] for event in events}


def test_finished_run_is_not_done_again(resumed: Any, workplace: Path, start: Start) -> None:
    path = workplace / "out" / f"run-{NAME}.jsonl"
    before = path.read_bytes()
    once_more = ["int8_moving.yaml", "plain.yaml", "--seed", "0", "--out", "out"]
    run = start("third", "run.py", once_more)
    output, _ = run.communicate()
    assert (run.returncode, f"{NAME} is done" in output) == (0, True)
    assert path.read_bytes() == before


def test_stale_rollouts_come_from_older_weights(workplace: Path, start: Start) -> None:
    process = start(
        "stale-records", "run.py", ["int8_moving.yaml", "stale.yaml", "--seed", "0", "--out", "out"]
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    run = read_run(workplace / "out" / "run-stale.int8_moving.seed0.jsonl")
    assert run.values("flashrl/version_lag") == [0.0, 1.0, 2.0, 2.0]
    engines = [load_file(path) for path in sorted((workplace / "stale-records").glob("engine-*"))]
    scales = [engine[f"{WEIGHT}_scale"] for engine in engines]
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])
    assert not torch.equal(scales[0], scales[3])


# What needs neither TRL nor vLLM.


def test_every_arm_and_condition_reads(evidence: Any) -> None:
    plan = evidence["plan"]
    arms = [plan.read_arm(name) for name in plan.names("arms")]
    conditions = [plan.read_condition(name) for name in plan.names("conditions")]
    assert len({arm.title for arm in arms}) == len(arms)
    assert sorted(condition.order for condition in conditions) == list(range(len(conditions)))
    known = {arm.name for arm in arms}
    assert all(set(arm.baselines) <= known for arm in arms)


def test_sweep_pairs_every_arm_with_its_baselines(evidence: Any) -> None:
    """Whenever an arm has a seed, what it is compared with has it too; three arms have all."""
    plan = evidence["plan"]
    arms = [plan.read_arm(name) for name in plan.names("arms")]
    condition = plan.read_condition("on_policy")
    plans = list(evidence["sweep"].plan_runs(arms, [condition], num_seeds=8, num_few_seeds=3))
    seeds: dict[str, set[int]] = {}
    for each in plans:
        seeds.setdefault(each.arm.name, set()).add(each.seed)
    full = {name for name, found in seeds.items() if found == set(range(8))}
    assert full == {"bf16", "int8", "int8_tis"}
    assert all(found >= {0, 1, 2} for found in seeds.values())
    assert [each.seed for each in plans] == sorted(each.seed for each in plans)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("arm", "rollout: {scheme: int8}", "expected a title"),
        ("arm", "title: A", "rollout is missing"),
        ("arm", "title: A\nrollout: {scheme: int9}", "int9"),
        ("arm", "title: A\nrollout: {scheme: int8}\ncorrection: tos", "tos"),
        ("arm", "title: A\nrollout: {scheme: int8}\nsmoothing: 2", "from 0 to 1"),
        ("condition", "title: C\nnum_step: 3", "expected a title and any of"),
        ("condition", "title: C\nlearning_rate: 1e-5", "write it as 1.0e-5"),
        ("condition", "title: C\nmini_batches: 3", "cannot be cut"),
        ("condition", "title: C\nmini_batches: 8\nlag: 2", "mini_batches must be 1"),
        ("condition", "title: C\ntask: golf", "known: short, chain"),
        ("condition", "title: [", "is no YAML"),
    ],
)
def test_files_with_mistakes_are_refused_by_name(
    evidence: Any, tmp_path: Path, kind: str, content: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises((ConfigError, LookupError), match=message):
        getattr(evidence["plan"], f"read_{kind}")(str(path))


@pytest.mark.parametrize("name", ["short", "chain"])
def test_answers_are_right_and_held_out_problems_are_not_trained_on(
    evidence: Any, name: str
) -> None:
    task = evidence["task"]
    chosen = task.TASKS[name]
    held_out = task.draw_problems(chosen, 256, seed="held out")
    trained = task.draw_problems(chosen, 4800, seed=0, without=held_out)
    assert not {p.question for p in trained} & {p.question for p in held_out}
    assert len({p.level for p in held_out}) == len(chosen.levels)
    for problem in trained[:200]:
        if name == "short" and problem.level != "two_step":
            sum_or_product = problem.question.removeprefix("What is ").partition("?")[0]
            assert eval(sum_or_product) == int(problem.answer)  # noqa: S307 - digits and a sign
        if name == "short":
            assert chosen.score(f" {problem.answer}.", problem.answer) == 1.0
            assert chosen.score(str(int(problem.answer) + 1), problem.answer) == 0.0


def test_chain_is_scored_up_to_its_first_mistake(evidence: Any) -> None:
    task = evidence["task"]
    [problem] = task.draw_problems(task.TASKS["chain"], 1, seed=0)
    terms = [int(word) for word in problem.question.rpartition(": ")[2].split(", ")]
    total, lines = terms[0], []
    for term in terms[1:]:
        lines.append(f"{total} + {term} = {total + term}")
        total += term
    score = task.TASKS["chain"].score
    assert score("\n".join(lines), problem.answer) == 1.0
    wrong = [*lines[:33], "1 + 1 = 3", *lines[34:]]
    assert score("\n".join(wrong), problem.answer) == pytest.approx(33 / 99)
    assert score("", problem.answer) == 0.0
