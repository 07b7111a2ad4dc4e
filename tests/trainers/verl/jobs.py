"""A small job for verl's own launcher, on a machine without GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

NUM_STEPS = 4

# What a machine without GPUs needs; nothing of it is FlashRL's.
CPU = """
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False
+actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.gpu_memory_utilization=0.1
trainer.device=cpu
""".split()  # noqa: SIM905
ENGINES = {
    "vllm": ["compilation_config.cudagraph_mode=NONE"],
    "sglang": """
device=cpu
attention_backend=torch_native
sampling_backend=pytorch
grammar_backend=none
enable_memory_saver=False
max_total_tokens=2048
sleep_on_idle=True
""".split(),  # noqa: SIM905
}
# A job that is small.
SMALL = f"""
algorithm.adv_estimator=grpo
data.train_batch_size=4
data.max_prompt_length=64
data.max_response_length=16
data.dataloader_num_workers=0
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.max_model_len=128
actor_rollout_ref.rollout.max_num_seqs=8
actor_rollout_ref.rollout.max_num_batched_tokens=256
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
actor_rollout_ref.rollout.agent.num_workers=1
reward.custom_reward_function.name=compute_score
reward.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.nnodes=1
trainer.total_training_steps={NUM_STEPS}
trainer.total_epochs=1
trainer.val_before_train=False
trainer.test_freq=-1
trainer.save_freq=1
trainer.logger=[console,tensorboard]
""".split()


def make_model(folder: Path) -> None:
    """Two layers with random BF16 weights, and as many logits as the tokenizer has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_data(folder: Path) -> None:
    import pandas

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 8 * a + b},
        }
        for a in range(4)
        for b in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    return sum(c.isalpha() for c in solution_str) / 10\n"
    )


def arguments(folder: Path, job: Path, engine: str = "vllm") -> list[str]:
    """verl's own arguments of the job."""
    options = f"+actor_rollout_ref.rollout.engine_kwargs.{engine}"
    return [
        *SMALL,
        *CPU,
        f"actor_rollout_ref.rollout.name={engine}",
        *(f"{options}.{option}" for option in ENGINES[engine]),
        f"data.train_files={job / 'train.parquet'}",
        f"data.val_files={job / 'train.parquet'}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"reward.custom_reward_function.path={job / 'reward.py'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]


def one_node(num_ranks: int) -> list[str]:
    """A Ray of its own, whose "GPUs" are a number."""
    ray = "ray_kwargs.ray_init"
    return [
        f"trainer.n_gpus_per_node={num_ranks}",
        f"+{ray}.address=local",
        f"{ray}.num_cpus=16",
        f"+{ray}.num_gpus={num_ranks}",
        f"+{ray}.include_dashboard=False",
    ]


def flashrl_run(*arguments: str, scheme: str, correction: str) -> list[str]:
    """``flashrl run verl`` with verl's own arguments."""
    command = [sys.executable, "-m", "flashrl.cli", "run", "verl", "--scheme", scheme]
    return [*command, "--correction", correction, "--", *arguments]
