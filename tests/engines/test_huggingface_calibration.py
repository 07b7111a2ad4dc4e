"""Statistics of prompts: what is cut, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashrl.engines.huggingface.calibration import collect_from_prompts, read_prompts
from flashrl.errors import ConfigError
from flashrl.testing import make_checkpoint

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model").path


def test_the_largest_of_all_prompts_is_kept_and_long_ones_are_cut(folder: Path) -> None:
    first, second = [1, 5, 9, 17], [30, 31, 32]
    calls: list[tuple[int, int, str]] = []
    both = collect_from_prompts(folder, [first, second], progress=lambda *a: calls.append(a))
    alone = [collect_from_prompts(folder, [ids]) for ids in (first, second)]
    assert NORM in both
    for name, amax in both.items():
        assert torch.equal(amax, torch.maximum(alone[0][name], alone[1][name]))
    cut = collect_from_prompts(folder, [[*first, 40, 41]], max_length=4)
    assert torch.equal(cut[NORM], alone[0][NORM])
    assert [(done, total) for done, total, _ in calls] == [(1, 2), (2, 2)]


def test_messages_need_a_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="prompt 2 is a list of messages"):
        collect_from_prompts(folder, ["1 + 1", [{"role": "user", "content": "2 + 2"}]])


def test_a_prompt_without_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        collect_from_prompts(folder, [""])


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not load as a causal language model"):
        collect_from_prompts(tmp_path, ["1 + 1"])


def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_prompts(tmp_path / "nowhere.jsonl")
