"""The report: drawn from files alone, one file, true to the numbers, partial if need be."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashrl.errors import ConfigError, MissingDependencyError
from flashrl.report import RunWriter, read_runs, summarize, write_report
from flashrl.report.records import Histogram

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

REWARDS = {
    "bf16": [0.5, 0.75, 1.0, 1.25],
    "tis": [0.4, 0.7, 0.9, 1.1],
    "raw": [0.45, 0.8, 1.0, 1.2],
}
SCHEMES = {"bf16": "bf16", "tis": "int8", "raw": "int8"}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Collects the text and the attributes; fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def write_runs(
    folder: Path,
    *,
    names: tuple[str, ...] = ("bf16", "tis", "raw"),
    cpu_seconds: float = 200.0,
) -> None:
    for order, name in enumerate(names):
        facts = {
            "title": name.upper(),
            "scheme": SCHEMES[name],
            "correction": "flashrl_c2" if name == "tis" else "off",
            "truncation": 2.0 if name == "tis" else None,
            "num_steps": 4,
            "num_threads": 2,
            "model": "A & B <tiny>",
            "best_reward": 1.5,
        }
        with RunWriter(folder, name, order=order, **facts) as writer:
            for step, reward in enumerate(REWARDS[name], start=1):
                writer.step(
                    {
                        "step": step,
                        "reward": reward,
                        "seconds": 10.0,
                        "flashrl/generate_ms": 2500.0,
                        "flashrl/update_ms": 370.0,
                        "flashrl/score_ms": 1000.0,
                        "flashrl/kl": 0.0123 * step,
                        "flashrl/ess": 0.97,
                        "flashrl/ratio_sd": 0.17,
                        "flashrl/ratio_p95": 1.44,
                        "flashrl/ratio_max": 3.0 + step,
                        "flashrl/frac_truncated": 0.021,
                    }
                )
                writer.tokens([-0.5, -1.0], [-0.6, -0.9])
            writer.end.update(
                seconds=120.0, cpu_seconds=cpu_seconds, peak_rss_bytes=3.9e9, verified_tensors=272
            )


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Page]:
    """A folder of three finished runs, and its page."""
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return (folder, *draw(folder))


def draw(folder: Path) -> tuple[str, Page]:
    text = write_report(read_runs(folder), folder).read_text(encoding="utf-8")
    return text, Page(text)


def test_page_is_one_file_that_needs_nothing_else(drawn: tuple[Path, str, Page]) -> None:
    _, text, page = drawn
    assert not re.search(r"(?:https?:)?//\w", text)
    assert "@import" not in text
    assert "<script" not in text
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "data"):
            assert value.startswith("#")
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", text))
    assert len(page.ids) == len(set(page.ids))
    references = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    assert references <= set(page.ids)


def test_page_says_the_numbers_of_the_records(drawn: tuple[Path, str, Page]) -> None:
    _, _, page = drawn
    # Mean KL of 0.0123 · (1 + 2 + 3 + 4) / 4, largest ratio 3 + 4, and the rest as written.
    for number in ("0.031", "97%", "0.17", "1.44", "7.00", "2.1%", "10.0", "2.0", "3.9", "272"):
        assert number in page.text
    assert "0.50 to 1.25 (BF16), 0.40 to 1.10 (TIS), 0.45 to 1.20 (RAW)" in page.text
    assert "A & B <tiny>" in page.text


def test_pictures_lie_beside_the_page(drawn: tuple[Path, str, Page]) -> None:
    folder, _, _ = drawn
    names = {path.name for path in folder.glob("*.png")}
    wanted = {"reward.png", "kl.png", "ess.png", "ratio.png", "truncated.png", "time.png"}
    assert names == wanted | {"tokens-bf16.png", "tokens-tis.png", "tokens-raw.png"}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert not list(folder.glob("*.partial"))


def test_summary_is_computed_from_the_steps(tmp_path: Path) -> None:
    write_runs(tmp_path)
    runs = {run["name"]: run for run in summarize(read_runs(tmp_path))["runs"]}
    assert list(runs) == ["bf16", "tis", "raw"]
    assert runs["tis"]["reward_end"] == 1.1
    assert runs["tis"]["kl"] == pytest.approx(0.03075)
    assert runs["tis"]["ratio_max"] == 7.0
    seconds = runs["raw"]["seconds_per_step"]
    assert seconds == {"generate": 2.5, "sync": 0.37, "score": 1.0, "train": 6.13, "total": 10.0}
    assert json.loads(json.dumps(runs, allow_nan=False)) == runs


@pytest.mark.parametrize(
    ("corrected", "uncorrected", "verdict"),
    [
        (0.0, 0.0, "Without the correction the reward was as good."),
        (1.0, 0.0, "With the correction the reward was better."),
        (0.0, 1.0, "Without the correction the reward was better."),
    ],
)
def test_verdict_follows_the_numbers_and_claims_no_quality(
    tmp_path: Path, corrected: float, uncorrected: float, verdict: str
) -> None:
    wobble = [0.0, 0.1] * 8
    for order, (name, shift) in enumerate((("tis", corrected), ("raw", uncorrected))):
        facts = {"scheme": "int8", "correction": "off" if name == "raw" else "default"}
        with RunWriter(tmp_path, name, order=order, num_steps=16, **facts) as writer:
            for step, value in enumerate(wobble, start=1):
                writer.step({"step": step, "reward": value + shift})
    findings = {f["headline"]: f["text"] for f in summarize(read_runs(tmp_path))["findings"]}
    error = statistics.stdev([0.0, 0.1, 0.0, 0.1]) / math.sqrt(4)
    assert f"{2 * math.hypot(error, error):.2f}" in findings[verdict]
    assert f"{corrected - uncorrected:+.2f}" in findings[verdict]
    assert "16 steps of one seed are no evidence about quality" in findings[verdict]


@pytest.mark.parametrize(("cpu_seconds", "busy"), [(200.0, False), (60.0, True)])
def test_times_of_a_busy_machine_are_not_compared(
    tmp_path: Path, cpu_seconds: float, busy: bool
) -> None:
    write_runs(tmp_path, cpu_seconds=cpu_seconds)  # of 120 s on two threads
    text = " ".join(finding["text"] for finding in summarize(read_runs(tmp_path))["findings"])
    assert ("as little as 25%" in text) is busy
    assert ("1.00 times the speed of the first run" in text) is not busy


def test_interrupted_run_is_a_valid_partial_report(tmp_path: Path) -> None:
    write_runs(tmp_path, names=("bf16",))
    run = RunWriter(tmp_path, "tis", order=1, num_steps=4)
    run.step({"step": 1, "reward": 0.25})
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    _, page = draw(tmp_path)
    assert "This report is partial." in page.text
    assert "tis interrupted after 1 of 4 steps" in page.text
    assert "1 of 4" in page.text


@pytest.mark.parametrize("cut", ["", '{"kind": "st', '{"kind": "step", "step": 1}\n{"kin'])
def test_run_that_was_killed_while_it_wrote_still_reads(tmp_path: Path, cut: str) -> None:
    head = json.dumps({"kind": "run", "name": "a", "title": "A", "num_steps": 9})
    (tmp_path / "run-a.jsonl").write_text(f"{head}\n{cut}", encoding="utf-8")
    [run] = read_runs(tmp_path)
    assert run.status == "cut off"
    assert run.title == "A"
    _, page = draw(tmp_path)
    assert "A cut off after" in page.text


def test_numbers_that_are_zero_are_shown_and_those_that_are_missing_are_not(tmp_path: Path) -> None:
    for order, fraction in enumerate((0.0, None)):
        facts = {"scheme": "int8", "correction": "default", "truncation": 2.0}
        with RunWriter(tmp_path, f"run{order}", order=order, **facts) as writer:
            writer.step({"step": 1, "reward": 0.0, "flashrl/frac_truncated": fraction})
    _, page = draw(tmp_path)
    assert "reward, last quarter 0.00 0.00" in page.text
    assert "weights truncated 0.0% —" in page.text
    assert "KL" not in page.text.split("What was learned")[0]
    assert "No ratio exceeded 2" in page.text


def test_not_finite_values_are_left_out_not_drawn(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "a") as writer:
        for step, value in enumerate((1.0, float("nan"), 3.0), start=1):
            writer.step({"step": step, "reward": value, "flashrl/kl": None})
    [run] = read_runs(tmp_path)
    assert run.series("reward") == ([1, 3], [1.0, 3.0])
    assert run.series("flashrl/kl") == ([], [])
    draw(tmp_path)
    assert not (tmp_path / "kl.png").exists()


def test_failed_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), RunWriter(tmp_path, "a"):
        raise ValueError("no such thing")
    [run] = read_runs(tmp_path)
    assert (run.status, run.end["error"]) == ("failed", "ValueError: no such thing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no folder"),
        ({}, "holds no run"),
        ({"run-a.jsonl": "{}\nnonsense\n{}\n"}, "line 2: not JSON"),
        ({"run-a.jsonl": "[1]\n{}\n"}, "line 1: an object was expected"),
    ],
)
def test_what_is_no_run_is_refused_by_name(
    tmp_path: Path, content: dict[str, str] | None, message: str
) -> None:
    folder = tmp_path / "runs"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refused:
        read_runs(folder)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    write_runs(tmp_path, names=("bf16",))
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "flashrl.report.figures", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flashrl\[report\]'"):
        write_report(read_runs(tmp_path), tmp_path)


def test_other_formats_come_in_through_a_reader(tmp_path: Path) -> None:
    from flashrl.report import Run

    class Fixed:
        def read(self, folder: Path) -> Any:
            yield Run(name=folder.name, facts={}, steps=({"step": 7, "reward": 1.0},))

    [run] = read_runs(tmp_path, readers=[Fixed()])
    assert run.series("reward") == ([7], [1.0])


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """A checkpoint of step 2, a run killed in step 4: 3 and the half line of 4 are done anew."""
    with RunWriter(tmp_path, "a", title="first") as writer:
        for step in (1, 2, 3):
            writer.step({"step": step, "reward": float(step)})
            writer.histogram(Histogram(step=step, edges=[0.0, 1.0], counts=[step]))
    path = tmp_path / "run-a.jsonl"
    path.write_text(path.read_text() + '{"kind": "step", "st')
    with RunWriter(tmp_path, "a", resume_after=2, title="second") as writer:
        for step in (3, 4):
            writer.step({"step": step, "reward": -float(step)})
    [run] = read_runs(tmp_path)
    assert run.series("reward") == ([1, 2, 3, 4], [1.0, 2.0, -3.0, -4.0])
    assert [histogram.step for histogram in run.histograms] == [1, 2]
    assert (run.title, run.status) == ("first", "complete")
    assert not list(tmp_path.glob("*.partial"))


def test_resuming_what_left_no_record_starts_one(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "a", resume_after=7, title="A") as writer:
        writer.step({"step": 8})
    [run] = read_runs(tmp_path)
    assert (run.title, len(run.steps)) == ("A", 1)


def test_damaged_compressed_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "run-a.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"run-a\.jsonl\.gz cannot be read"):
        read_runs(tmp_path)
