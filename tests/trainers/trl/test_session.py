"""The trainer on a session: TRL's own loop, a tiny model, every step checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import flashrl
from flashrl.core.correction import CorrectionConfig
from flashrl.errors import ConfigError, VerificationError
from flashrl.testing import Checkpoint, make_checkpoint

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from flashrl.trainers.trl.corrected import CorrectedGRPOTrainer  # noqa: E402
from flashrl.trainers.trl.trainer import SessionGRPOTrainer  # noqa: E402

# TRL 1.16 uses names that newer transformers deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

PROMPTS = [f"{a} + {b} =" for a in range(1, 5) for b in range(1, 5)]
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "learning_rate": 1e-2,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


class Recorded(SessionGRPOTrainer):
    """Keeps the batches that the loss gets."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("batches", []).append(batch)
        return batch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With logits about as spread as a real model's, so that completions differ."""
    return make_checkpoint(tmp_path_factory.mktemp("policy"), "llama_tied", initializer_range=0.08)


def load(checkpoint: Checkpoint) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Differs from completion to completion, so that GRPO has advantages."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def make_trainer(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    scheme: str = "int8",
    trainer: type = Recorded,
    reward: Any = reward,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """``arguments`` are GRPOConfig's, ``options`` the trainer's own."""
    options = dict(options or {})
    if issubclass(trainer, SessionGRPOTrainer):
        options["session"] = flashrl.attach(load(checkpoint), scheme)
    return trainer(
        model=load(checkpoint),
        processing_class=transformers.AutoTokenizer.from_pretrained(checkpoint.path),
        reward_funcs=[reward],
        args=GRPOConfig(output_dir=str(folder), **{**ARGUMENTS, **arguments}),
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        **options,
    )


def logs_of(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def naive_weights(batch: dict[str, Any], bound: float) -> list[list[float]]:
    """min(exp(log π - log μ), C), token by token in Python's floats."""
    return [
        [min(math.exp(pi - mu), bound) if kept else 0.0 for pi, mu, kept in zip(*row, strict=True)]
        for row in zip(
            batch["old_per_token_logps"].double().tolist(),
            batch["sampling_per_token_logps"].double().tolist(),
            batch["completion_mask"].tolist(),
            strict=True,
        )
    ]


@pytest.mark.parametrize("scheme", ["bf16", "int8", "fp8_channel"])
def test_engine_holds_the_trainers_weights_at_every_step(
    checkpoint: Checkpoint, tmp_path: Path, scheme: str
) -> None:
    verified = []

    def check(completions: list[str], **_: Any) -> list[float]:
        # The reward is computed between the push and the optimizer step.
        report = trainer.session.verify(trainer.model.named_parameters())
        verified.append((trainer.state.global_step, report.version, len(report.comparisons)))
        return reward(completions)

    trainer = make_trainer(checkpoint, tmp_path, scheme=scheme, reward=check)
    trainer.train()
    count = len(list(checkpoint.named_tensors()))
    assert verified == [(step, step, count) for step in range(3)]
    with pytest.raises(VerificationError):  # the optimizer has stepped since
        trainer.session.verify(trainer.model.named_parameters())
    for logs in logs_of(trainer):
        measured = {
            name: logs[f"flashrl/{name}"] for name in ("kl", "ess", "ratio_sd", "ratio_max")
        }
        assert all(math.isfinite(value) for value in measured.values())
        assert measured["kl"] >= 0
        assert 0 < measured["ess"] <= 1 + 1e-6
        assert abs(logs["flashrl/ratio_mean"] - 1) < 0.05
        assert logs["flashrl/scheme"] == scheme
        assert logs["flashrl/version_lag"] == 0
        assert min(logs[f"flashrl/{part}_ms"] for part in ("update", "generate", "score")) > 0


def test_correction_weighs_every_token_and_off_weighs_none(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    batches = {}
    for correction in ("flashrl_c2", "off", "tight"):
        config = CorrectionConfig(name="tight", high=1.001) if correction == "tight" else correction
        trainer = make_trainer(
            checkpoint, tmp_path, options={"correction": config}, max_steps=1, seed=3
        )
        trainer.train()
        batches[correction] = trainer.batches[0]
    for correction, bound in (("flashrl_c2", 2.0), ("tight", 1.001)):
        batch, plain = batches[correction], batches["off"]
        assert torch.equal(batch["completion_ids"], plain["completion_ids"])
        expected = torch.tensor(naive_weights(batch, bound)) * plain["advantages"]
        torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(batch["advantages"], plain["advantages"])
    # Off: GRPO's own advantage (r - mean) / (std + 1e-4) of a group, on every sampled token.
    plain, mask = batches["off"], batches["off"]["completion_mask"]
    texts = transformers.AutoTokenizer.from_pretrained(checkpoint.path).batch_decode(
        [row[kept.bool()] for row, kept in zip(plain["completion_ids"], mask, strict=True)],
        skip_special_tokens=True,
    )
    groups = torch.tensor(reward(texts)).view(-1, 4)
    deviation = groups.std(dim=1, keepdim=True) + 1e-4
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / deviation).view(-1, 1)
    torch.testing.assert_close(plain["advantages"], advantages * mask)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_loss_and_gradient_are_those_of_trls_own_correction(
    checkpoint: Checkpoint, tmp_path: Path, loss_type: str
) -> None:
    """TRL multiplies the clipped loss by the weight; here the weight is inside the advantage."""
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1, loss_type=loss_type)
    trainer.train()
    ours = dict(trainer.batches[0])
    # As if the policy had moved since the rollout, so that some ratios are clipped.
    shift = torch.linspace(-0.5, 0.5, ours["completion_ids"].numel())
    ours["old_per_token_logps"] = ours["old_per_token_logps"] + shift.view_as(ours["advantages"])
    weights = torch.tensor(naive_weights(trainer.batches[0], 2.0))
    theirs = dict(ours, importance_sampling_ratio=weights)
    theirs["advantages"] = torch.where(
        weights > 0, ours["advantages"] / weights, torch.zeros_like(weights)
    )
    results = []
    for batch, use_vllm in ((ours, False), (theirs, True)):
        trainer.model.zero_grad()
        trainer.use_vllm = use_vllm
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        results.append((loss.detach(), gradient))
    assert results[0][1].abs().max() > 0
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_uncorrected_training_is_trls_own_given_the_same_completions(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    # Plain gradient descent: Adam would blow rounding up where a gradient is all but zero.
    ours = make_trainer(checkpoint, tmp_path, options={"correction": "off"}, optim="sgd")
    ours.train()
    recorded = iter(ours.batches)

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        batch = next(recorded)

        def rows(ids: str, mask: str) -> list[list[Any]]:
            return [
                row[kept.bool()].tolist() for row, kept in zip(batch[ids], batch[mask], strict=True)
            ]

        return {
            "prompt_ids": rows("prompt_ids", "prompt_mask"),
            "completion_ids": rows("completion_ids", "completion_mask"),
            "logprobs": rows("sampling_per_token_logps", "completion_mask"),
        }

    theirs = make_trainer(
        checkpoint, tmp_path, trainer=GRPOTrainer, options={"rollout_func": replay}, optim="sgd"
    )
    theirs.train()
    before = dict(load(checkpoint).named_parameters())
    moved = 0.0
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter, theirs.model.get_parameter(name), msg=name)
        moved = max(moved, float((parameter - before[name]).detach().abs().max()))
    assert moved > 1e-4


def test_truncated_support_is_put_right_by_its_mass(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """μ is renormalised by top-p and π is not: without log S every ratio would be S, below 1."""
    trainer = make_trainer(
        checkpoint,
        tmp_path,
        scheme="bf16",
        top_p=0.7,
        temperature=0.8,
    )
    trainer.train()
    for logs in logs_of(trainer):
        assert logs["flashrl/ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert logs["flashrl/ratio_max"] == pytest.approx(1, abs=1e-2)
    batch = trainer.batches[0]
    raw = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
    assert raw[batch["completion_mask"].bool()].mean() < 0.9


def test_lag_is_counted_when_rollouts_are_reused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint, tmp_path, num_iterations=2, max_steps=4)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [logs["flashrl/version_lag"] for logs in steps] == [0, 1, 0, 1]
    assert ["flashrl/update_ms" in logs for logs in steps] == [True, False, True, False]
    assert trainer.session.version == 2  # pushed for the second rollout, before step 3


def test_stop_tokens_end_a_completion(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1, options={"stop_token_ids": range(40)})
    trainer.train()
    batch = trainer.batches[0]
    for ids, mask in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True):
        sampled = ids[mask].tolist()
        assert all(token >= 40 for token in sampled[:-1])
        assert sampled[-1] < 40 or len(sampled) == 6


def test_what_it_does_not_do_is_refused_all_at_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        make_trainer(
            checkpoint,
            tmp_path,
            options={"correction": "prime_rl_dppo_tv", "rollout_func": print},
            generation_kwargs={"num_beams": 2},
            use_vllm=True,
            loss_type="vespo",
        )
    for part in ("policy_gradient", "rollout_func", "generation_kwargs", "use_vllm", "vespo"):
        assert part in str(refused.value)


def test_bypass_clips_against_the_rollout(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The ratio is π_θ / μ, and no weight beside it."""
    trainer = make_trainer(checkpoint, tmp_path, options={"correction": "bypass"}, max_steps=1)
    trainer.train()
    batch, mask = trainer.batches[0], trainer.batches[0]["completion_mask"].bool()
    assert torch.equal(batch["old_per_token_logps"][mask], batch["sampling_per_token_logps"][mask])
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    log_probs, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        mask.shape[1],
    )
    ratio = (log_probs - batch["sampling_per_token_logps"]).exp()[mask]
    advantages = batch["advantages"].expand_as(mask)[mask]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    torch.testing.assert_close(loss, -surrogate.sum() / mask.sum(), rtol=1e-4, atol=1e-6)


def test_correcting_twice_is_refused(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction is True"):
        CorrectedGRPOTrainer(correction="icepop", args=args, model="none", reward_funcs=reward)
