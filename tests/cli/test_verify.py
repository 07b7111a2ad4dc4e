"""``flashrl verify``: it passes, it fails, and it says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrl.cli import main
from flashrl.engines.huggingface.layers import QuantizedLinear
from flashrl.testing import make_checkpoint

pytest.importorskip("transformers")


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["verify", *args])
    return result.exit_code, result.stdout


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
@pytest.mark.parametrize("num_models", [1, 2])
def test_real_checkpoints_pass(tmp_path: Path, architecture: str, num_models: int) -> None:
    args = ["--json", "--scheme", "fp8_channel"]
    for seed in range(num_models):
        folder = make_checkpoint(tmp_path / str(seed), architecture, seed=seed).path
        args += ["--model", str(folder)]
    code, output = run(*args)
    data = json.loads(output)
    assert (code, data["ok"]) == (0, True)
    names = [check["what"] for check in data["checks"]]
    assert [name for name in names if name.startswith("push")] == ["push A", "push B", "push A"]
    assert names[-1].startswith("control: ")
    assert data["checks"][-1]["detail"] == "found and named"


def test_it_needs_no_model() -> None:
    code, output = run()
    assert code == 0
    assert "huggingface, int8" in output
    assert "FAILED" not in output


def test_a_loader_that_forgets_the_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    load = QuantizedLinear.load

    def forgetful(self: QuantizedLinear, weight, **kwargs) -> None:  # type: ignore[no-untyped-def]
        scale = self.weight_scale.data.clone()
        load(self, weight, **kwargs)
        if getattr(self, "loaded", False):
            self.weight_scale.data.copy_(scale)
        self.loaded = True

    monkeypatch.setattr(QuantizedLinear, "load", forgetful)
    code, output = run("--json")
    failed = [check["what"] for check in json.loads(output)["checks"] if not check["passed"]]
    assert code == 1
    assert "push B" in failed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--engine", "vlm"], "no adapter 'vlm'"),
        (["--scheme", "int7"], "unknown scheme 'int7'"),
        (["--model", "."] * 3, "at most two models"),
        (["--model", "no-such-folder"], "does not exist"),
    ],
)
def test_bad_input_is_exit_code_2(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["verify", *args])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["verify", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
