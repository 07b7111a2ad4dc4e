"""Options and guards of TRL's own trainer, against TRL's own parser and functions."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from flashrl.core.correction import CorrectionConfig
from flashrl.core.schemes import get_scheme
from flashrl.errors import RolloutError, UnknownNameError, UnsupportedError
from flashrl.trainers import corrections, guards
from flashrl.trainers.trl import TRLAdapter
from flashrl.trainers.trl.options import read_options
from flashrl.trainers.trl.plugin import mask_unusable

NATIVE = {
    "tis": ("token_truncate", None, 2.0),
    "flashrl_c8": ("token_truncate", None, 8.0),
    "icepop": ("token_mask", 0.5, 5.0),
    "trl": ("sequence_mask", None, 3.0),
}
LACKING = ("bypass", "ais", "skyrl_geometric", "seq_mask_tis", "dppo_tv")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_warned", set())


@pytest.fixture(scope="module")
def trl(require_packages: Any) -> Any:
    require_packages("trl")
    return importlib.import_module("trl")


def parse(trl: Any, correction: str) -> Any:
    """The configuration that a script gets whose parser is TRL's."""
    adapter = TRLAdapter()
    overrides = adapter.overrides(get_scheme("int8"), correction=correction)
    arguments = ["--output_dir", "out", "--use_cpu", "True", "--bf16", "False"]
    completed = adapter.launcher.complete(arguments, overrides)
    return trl.TrlParser((trl.GRPOConfig,)).parse_args_and_config(completed)[0]


@pytest.mark.parametrize("name", NATIVE)
def test_what_trl_has_is_said_in_its_own_fields(trl: Any, name: str) -> None:
    args = parse(trl, name)
    assert args.use_vllm
    assert args.vllm_importance_sampling_correction
    assert (
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_min,
        args.vllm_importance_sampling_clip_max,
    ) == NATIVE[name]
    wanted = corrections.find(name)
    assert read_options(args) == CorrectionConfig(
        name="trl", level=wanted.level, bound=wanted.bound, low=wanted.low, high=wanted.high
    )


def test_off_is_off(trl: Any) -> None:
    args = parse(trl, "off")
    assert args.vllm_importance_sampling_correction is False
    assert read_options(args).level == "none"


@pytest.mark.parametrize("name", LACKING)
def test_what_it_lacks_is_refused_with_the_trainer_that_has_it(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"CorrectedGRPOTrainer .* with correction='"):
        TRLAdapter().overrides(get_scheme("int8"), correction=name)


def test_every_correction_is_one_or_the_other() -> None:
    for name in corrections.names():
        known = name in (*NATIVE, *LACKING, "off") or corrections.find(name) in (
            corrections.find(other) for other in (*NATIVE, *LACKING, "verl", "openrlhf")
        )
        assert known or corrections.find(name).high == 2.0
    with pytest.raises(UnknownNameError):
        TRLAdapter().overrides(get_scheme("int8"), correction="tsi")


def test_a_bound_that_is_not_there_is_infinite(trl: Any) -> None:
    args = parse(trl, "tis")
    args.vllm_importance_sampling_clip_max = None
    assert read_options(args).high == math.inf


def test_a_token_without_a_log_probability_counts_as_not_sampled() -> None:
    ids = [[5, 6, 7], [8]]
    mask, log_probs, num_unusable = mask_unusable(ids, None, [[-1.0, None, -2.0], [-0.5]])
    assert mask == [[1, 0, 1], [1]]
    assert num_unusable == 1
    assert all(math.isfinite(value) for row in log_probs for value in row)
    assert log_probs[0][0] == -1.0
    assert log_probs[1] == [-0.5]


def test_what_a_tool_said_stays_masked() -> None:
    mask, _, num_unusable = mask_unusable([[5, 6, 7]], [[1, 0, 1]], [[-1.0, math.nan, -math.inf]])
    assert mask == [[1, 0, 0]]
    assert num_unusable == 1


def test_a_good_batch_passes_untouched() -> None:
    log_probs: list[list[float | None]] = [[-1.0], [-2.0, 0.0]]
    assert mask_unusable([[1], [2, 3]], None, log_probs) == (None, log_probs, 0)


def test_log_probs_that_do_not_line_up_are_an_error() -> None:
    """vime#70: a length mismatch is never padded or cut."""
    with pytest.raises(RolloutError, match="response 0 has 2 tokens and 1 log-probabilities"):
        mask_unusable([[5, 6]], None, [[-1.0]])
    with pytest.raises(RolloutError, match="brought no log-probabilities"):
        mask_unusable([[5, 6]], None, None)


@pytest.mark.filterwarnings("ignore:.*:Warning")
def test_install_is_undone_by_uninstall(trl: Any) -> None:
    module = importlib.import_module("trl.trainer.grpo_trainer")
    names = ("_generate", "_generate_and_score_completions", "_compute_loss")
    before = [getattr(module.GRPOTrainer, name) for name in names]
    adapter = TRLAdapter()
    try:
        adapter.install()
        adapter.install()
        changed = [getattr(module.GRPOTrainer, name) for name in names]
        assert [method.__wrapped__ for method in changed] == before
    finally:
        adapter.uninstall()
    assert [getattr(module.GRPOTrainer, name) for name in names] == before
