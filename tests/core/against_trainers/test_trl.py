"""The correction inside TRL 1.16's GRPOTrainer, on the same rollouts."""

import math
import warnings

import pytest
import torch

from flashrl.core.correction import CorrectionConfig, compute, get_config
from flashrl.core.correction.losses import policy_loss

# What a peer or its dependencies deprecate is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = range(4)
TRL_BATCH = 6


@pytest.fixture(scope="module")
def trl_trainer(require_peer, tmp_path_factory):
    """A real GRPOTrainer on a one-layer model, with rollouts from its ``rollout_func`` hook.

    Its correction is part of ``_generate_and_score_completions`` and acts only with ``use_vllm``,
    so that is switched on once the trainer stands: no engine is asked, the hook generates.
    """
    require_peer("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        words = {f"w{i}": i for i in range(32)} | {"<pad>": 32, "<eos>": 33, "<unk>": 34}
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        tokenizer = Tokenizer(models.WordLevel(words, special["unk_token"]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        model = LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.5,
        )
        torch.manual_seed(0)
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(model),
            args=GRPOConfig(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                use_cpu=True,
                bf16=False,
                report_to=[],
                per_device_train_batch_size=TRL_BATCH,
                num_generations=2,
                beta=0.0,
            ),
            reward_funcs=lambda completions, **_: [float(i % 3) for i in range(len(completions))],
            train_dataset=Dataset.from_list([{"prompt": "w1 w2"}] * TRL_BATCH),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
            rollout_func=lambda prompts, trainer: trainer.next_rollout,
        )
    trainer.model.eval()  # no dropout, and no division by gradient accumulation steps
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = True
    trainer._last_loaded_step = trainer.state.global_step
    return trainer


def trl_rollout(trainer, seed, missing=()):
    """One scored batch of TRL's: the tensors its loss takes, its importance ratios among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (TRL_BATCH,), generator=generator).tolist()
    completions = [
        torch.randint(0, 32, (length,), generator=generator).tolist() for length in lengths
    ]
    prompts = [[1, 2]] * TRL_BATCH
    trainer.next_rollout = {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "logprobs": [[-1.0] * length for length in lengths],
    }
    inputs = [{"prompt": "w1 w2"}] * TRL_BATCH
    old = trainer._generate_and_score_completions(inputs)["old_per_token_logps"]
    log_ratio = 0.3 * torch.randn(old.shape, generator=generator)
    rollout = (old - log_ratio).clamp(max=-1e-4)
    trainer.next_rollout["logprobs"] = [
        [None if (row, c) in missing else rollout[row, c].item() for c in range(length)]
        for row, length in enumerate(lengths)
    ]
    return trainer._generate_and_score_completions(inputs)


def correct_trl(scored, config):
    return compute(
        old_log_probs=scored["old_per_token_logps"],
        rollout_log_probs=scored["sampling_per_token_logps"],
        response_mask=scored["completion_mask"],
        config=config,
    )


TRL = [
    ("token_truncate", None, 1.2, CorrectionConfig(high=1.2)),
    ("token_truncate", 0.8, 1.2, CorrectionConfig(low=0.8, high=1.2)),
    ("token_mask", None, 1.2, CorrectionConfig(bound="mask", high=1.2)),
    ("token_mask", 0.8, None, CorrectionConfig(bound="mask", low=0.8, high=math.inf)),
    ("sequence_truncate", None, 1.2, CorrectionConfig(level="sequence", high=1.2)),
    ("sequence_mask", None, 1.2, CorrectionConfig(level="sequence", bound="mask", high=1.2)),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mode", "clip_min", "clip_max", "config"), TRL)
def test_weights_are_those_of_trl(trl_trainer, monkeypatch, seed, mode, clip_min, clip_max, config):
    monkeypatch.setattr(trl_trainer, "vllm_importance_sampling_mode", mode)
    monkeypatch.setattr(trl_trainer, "vllm_importance_sampling_clip_min", clip_min)
    monkeypatch.setattr(trl_trainer, "vllm_importance_sampling_clip_max", clip_max)
    scored = trl_rollout(trl_trainer, seed)
    theirs = scored["importance_sampling_ratio"] * scored["completion_mask"]
    weights, metrics = correct_trl(scored, config)
    torch.testing.assert_close(weights, theirs)
    assert metrics["truncated_fraction"] + metrics["dropped_fraction"] > 0
    difference = trl_trainer._metrics["eval"]["sampling/sampling_logp_difference/max"][-1]
    assert metrics["log_ratio_max"] == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("bnpo", "token_mean"),
        ("grpo", "seq_mean_token_mean"),
        ("luspo", "seq_mean_token_sum"),
    ],
)
def test_the_loss_is_that_of_trl(trl_trainer, monkeypatch, seed, loss_type, aggregation):
    monkeypatch.setattr(trl_trainer, "loss_type", loss_type)
    monkeypatch.setattr(trl_trainer, "vllm_importance_sampling_mode", "sequence_mask")
    scored = trl_rollout(trl_trainer, seed)
    model = trl_trainer.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():  # the policy moves, so that the PPO ratio is not 1
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    try:
        theirs = trl_trainer._compute_loss(model, scored)
        ids = torch.cat([scored["prompt_ids"], scored["completion_ids"]], dim=1)
        attention = torch.cat([scored["prompt_mask"], scored["completion_mask"]], dim=1)
        log_probs, _, _ = trl_trainer._get_per_token_logps_and_entropies(
            model, ids, attention, scored["completion_ids"].shape[1]
        )
        ours = policy_loss(
            log_probs,
            advantages=scored["advantages"],
            response_mask=scored["completion_mask"],
            weights=correct_trl(scored, "trl").weights,
            old_log_probs=scored["old_per_token_logps"],
            config="trl",
            aggregation=aggregation,
        )
        torch.testing.assert_close(ours, theirs)
        parameters = list(model.parameters())
        for ours_grad, theirs_grad in zip(
            torch.autograd.grad(ours, parameters),
            torch.autograd.grad(theirs, parameters),
            strict=True,
        ):
            torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-4, atol=1e-6)
    finally:
        model.load_state_dict(before)


def test_the_trl_preset_is_its_default(trl_trainer):
    preset = get_config("trl")
    args = trl_trainer.args
    assert args.vllm_importance_sampling_mode == f"{preset.level}_{preset.bound}"
    assert args.vllm_importance_sampling_clip_max == preset.high


def test_a_missing_log_prob_is_dropped_where_trl_trusts_it(trl_trainer, monkeypatch):
    """TRL gives a token without rollout log-prob the ratio 1, the one value nobody measured.

    Here it is an error, or dropped and counted; the rest of the batch is weighed alike.
    """
    monkeypatch.setattr(trl_trainer, "vllm_importance_sampling_mode", "token_truncate")
    scored = trl_rollout(trl_trainer, 0, missing={(2, 1)})
    theirs = scored["importance_sampling_ratio"] * scored["completion_mask"]
    weights, metrics = correct_trl(scored, CorrectionConfig(high=3.0, on_invalid="mask"))
    assert theirs[2, 1] == 1.0
    assert weights[2, 1] == 0.0
    assert metrics["invalid_fraction"] > 0
    theirs[2, 1] = 0.0
    torch.testing.assert_close(weights, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_off_policy_mask_is_that_of_trl(trl_trainer, seed, make_batch):
    batch = make_batch(seed, batch=40)
    theirs = trl_trainer.get_off_policy_mask(
        advantages=batch.advantages,
        per_token_logps=batch.old,
        sampling_per_token_logps=batch.rollout,
        mask=batch.mask,
        off_policy_threshold=0.05,
    )
    ours = batch.correct(CorrectionConfig(level="none", off_policy_delta=0.05)).weights
    assert 0 < theirs.sum() < theirs.numel()
    torch.testing.assert_close(ours, theirs * batch.mask)
