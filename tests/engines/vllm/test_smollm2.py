"""The same workflow on a real model, SmolLM2-135M-Instruct: what 8 bit costs, what smoothing saves.

No release of llm-compressor installs beside vLLM 0.32: they pin different compressed-tensors and
transformers.  With FLASHRL_LLM_COMPRESSOR, a Python that has it, that makes the SmoothQuant copy;
else it is made here, with the factors that ``flashrl profile --calibrate`` finds.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from flashrl.core.profiles.files import load_profile
from flashrl.demo.model import prepare_model
from flashrl.errors import MissingDependencyError

from .conftest import note_figure
from .w8a8 import make_w8a8
from .workflow import SCRIPT, check_pushed, check_started, run, run_command, run_script

CALIBRATION = [
    "The harbour was quiet before sunrise. Two fishermen untangled their nets while a grey cat "
    "watched from the roof of the customs house, waiting for the first boat to come in.",
    "To multiply two fractions, multiply the numerators and then the denominators. For example, "
    "2/3 times 4/5 is 8/15. To divide, turn the second fraction upside down first.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "Question: A shop sells pencils in boxes of 12. How many boxes does a school need for 150 "
    "pupils?\nAnswer: 150 / 12 = 12.5, so the school needs 13 boxes.",
]
SCORED = [
    "Water boils at a lower temperature in the mountains, because the air presses less on its "
    "surface. That is why beans take longer to cook in a village at 3000 metres.",
    "My grandmother kept bees behind the barn. In May she would lift the lid of a hive, listen, "
    "and tell us whether the summer would be long.",
    "Question: Anna has 3 baskets with 14 apples each and gives away 9 apples. How many are left?\n"
    "Answer: 3 times 14 is 42, and 42 minus 9 is 33, so 33 apples are left.",
    "for name, price in sorted(prices.items()):\n    if price > limit:\n"
    "        print(name, price)\n",
    "The Roman road ran straight across the plain, and where it met the river there had been a "
    "bridge of oak. Only the stumps of its piles were left, black and hard as iron.",
    "Dear Sir or Madam, thank you for your letter of 4 March. We are sorry to hear that the parcel "
    "arrived damaged, and we will send you a new one this week.",
]
# What the model, sure of itself, goes on with.
BEGUN = {
    "Capitals: the capital of Italy is Rome, that of Spain is Madrid, that of France is": " Paris",
    "Counting: one, two, three, four, five,": " six, seven, eight,",
    "2, 4, 6, 8, 10, 12, 14,": " 16, 18, 20,",
}


@attrs.frozen(kw_only=True)
class SmolLM2:
    """The model as Hugging Face runs it in float32."""

    path: Path
    model: Any
    tokenizer: Any

    @property
    def scored(self) -> list[list[int]]:
        """The texts as token ids."""
        return [self.tokenizer(text)["input_ids"] for text in SCORED]

    @property
    def prompts(self) -> list[list[int]]:
        """What is to be gone on with, as token ids."""
        return [self.tokenizer(text)["input_ids"] for text in BEGUN]

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """Of whatever may follow each token but the last, float32 (len(ids) - 1, vocabulary)."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids[:-1]])).logits
        return torch.log_softmax(logits[0].float(), dim=-1)

    def compare(self, scores: list[list[float]]) -> float:
        """Mean absolute error of an engine's log-probabilities of the texts."""
        errors = [
            torch.tensor(found) - self.log_probs(ids).gather(1, torch.tensor([ids[1:]]).T)[:, 0]
            for ids, found in zip(self.scored, scores, strict=True)
        ]
        return float(torch.cat(errors).abs().mean())

    def judge(self, answers: list[dict[str, Any]]) -> tuple[float, float]:
        """Of greedy answers: mean absolute error of log-probabilities, and top-1 agreement."""
        errors, agreed = [], []
        for prompt, answer in zip(self.prompts, answers, strict=True):
            tokens = torch.tensor(answer["tokens"])
            expected = self.log_probs([*prompt, *answer["tokens"]])[-len(tokens) :]
            found = torch.tensor(answer["log_probs"])
            errors.append(found - expected.gather(1, tokens[:, None])[:, 0])
            agreed.append(expected.argmax(1) == tokens)
        return float(torch.cat(errors).abs().mean()), float(torch.cat(agreed).float().mean())


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    try:
        path = prepare_model()
    except MissingDependencyError as error:
        if os.environ.get("FLASHRL_REQUIRE_MODEL"):
            raise
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return SmolLM2(
        path=path,
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
        tokenizer=AutoTokenizer.from_pretrained(path),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For a gigabyte of checkpoints, which pytest would keep."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def w8a8(smollm2: SmolLM2, folder: Path) -> Path:
    """A SmoothQuant W8A8 copy, by llm-compressor if there is one."""
    prompts, made = folder / "prompts.jsonl", folder / "w8a8"
    prompts.write_text("\n".join(map(json.dumps, CALIBRATION)))
    compressor = os.environ.get("FLASHRL_LLM_COMPRESSOR")
    if compressor:
        run(SCRIPT.with_name("compress.py"), smollm2.path, prompts, made, python=compressor)
        return made
    calibrated = folder / "calibrated.safetensors"
    run_command(
        *("profile", "-m", smollm2.path, "--calibrate", prompts, "--alpha", 0.5),
        *("--no-static-scales", "-o", calibrated),
    )
    return make_w8a8(smollm2.path, made, load_profile(calibrated))


@pytest.fixture(scope="module")
def config(smollm2: SmolLM2, w8a8: Path, folder: Path) -> Path:
    """What ``flashrl profile`` and ``flashrl setup`` make of the two."""
    profile, config = folder / "profile.pt", folder / "config.yaml"
    run_command("profile", "-m", smollm2.path, "-qm", w8a8, "-o", profile, "--fn", "int8")
    run_command("setup", "-m", w8a8, "-p", profile, "--fn", "int8", "-o", config)
    return config


@pytest.fixture(scope="module")
def perturbed(smollm2: SmolLM2, folder: Path) -> Path:
    """Other weights, as training would push them."""
    torch.manual_seed(0)
    tensors = load_file(smollm2.path / "model.safetensors")
    moved = {name: t + 0.05 * t.std() * torch.randn_like(t) for name, t in tensors.items()}
    save_file(moved, folder / "perturbed.safetensors")
    return folder / "perturbed.safetensors"


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, smollm2: SmolLM2, folder: Path
) -> Callable[[str], dict[str, Any]]:
    """What the script answers under a FLASHRL_CONFIG; ``profile`` is that of the two commands."""
    made: dict[str, dict[str, Any]] = {}

    def answers(name: str) -> dict[str, Any]:
        if name not in made:
            wanted: dict[str, Any] = {"prompts": smollm2.prompts, "scored": smollm2.scored}
            config = name
            if name == "profile":
                wanted["pushed"] = request.getfixturevalue("perturbed")
                config = str(request.getfixturevalue("config"))
            made[name] = run_script(smollm2.path, folder, {"FLASHRL_CONFIG": config}, **wanted)
        return made[name]

    return answers


def test_a_push_is_smoothed_and_quantized_bit_for_bit(
    answers: Callable[[str], dict[str, Any]],
    smollm2: SmolLM2,
    w8a8: Path,
    perturbed: Path,
    folder: Path,
) -> None:
    """``flashrl profile``, ``flashrl setup``, and a script that nobody edited."""
    answer = answers("profile")
    assert answer["model"] == str(w8a8)
    profile = load_profile(folder / "profile.pt")
    assert len(profile.smoothing) == 2 * 30
    check_started(folder / "started.safetensors", w8a8)
    weights = load_file(perturbed)
    check_pushed(folder / "pushed.safetensors", weights, profile)
    # And it answers as that model does.
    model = copy.deepcopy(smollm2.model)
    model.load_state_dict(weights, strict=False)
    error, _ = attrs.evolve(smollm2, model=model).judge(answer["pushed"])
    other, _ = smollm2.judge(answer["pushed"])
    note_figure(f"pushed: mean absolute error {error:.4f}, to the weights before {other:.4f}")
    assert error < 0.15
    assert other > 1.5 * error


def test_smoothing_lowers_the_error_of_log_probs(
    answers: Callable[[str], dict[str, Any]], smollm2: SmolLM2
) -> None:
    """Than that of round-to-nearest, both against Hugging Face in float32."""
    nearest, smoothed = (
        smollm2.compare(answers(config)["scores"]) for config in ("int8", "profile")
    )
    note_figure(f"texts: mean absolute error {nearest:.4f} int8, {smoothed:.4f} int8 smoothed")
    assert smoothed < 0.9 * nearest


@pytest.mark.parametrize("config", ["int8", "fp8_channel", "profile"])
def test_greedy_text_is_sensible(
    config: str, answers: Callable[[str], dict[str, Any]], smollm2: SmolLM2
) -> None:
    """It goes on as it should, and Hugging Face in float32 thinks alike of each token."""
    found = answers(config)["started"]
    error, agreement = smollm2.judge(found)
    note_figure(
        f"{config}: greedy, mean absolute error {error:.4f}, top-1 agreement {agreement:.3f}"
    )
    for answer, expected in zip(found, BEGUN.values(), strict=True):
        assert smollm2.tokenizer.decode(answer["tokens"]).startswith(expected)
    assert error < 0.15
    assert agreement > 0.9
