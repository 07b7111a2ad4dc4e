"""Tiny random checkpoints that real engines load: a second to make, a megabyte on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from flashrl.errors import MissingDependencyError, UnknownNameError

__all__ = ["ARCHITECTURES", "Checkpoint", "make_checkpoint"]

# Every dimension is a multiple of 16, as 8-bit kernels want; head and MoE sizes are small but real.
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that the greedy choice is never a near tie.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""What :func:`make_checkpoint` can make: the model's class prefix, and its config beyond sizes."""


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A checkpoint folder, and the weights a trainer of that model would push.

    Args:
        path: Folder with config, safetensors and tokenizer.
        architecture: A key of :data:`ARCHITECTURES`.
        model: The transformers model it was saved from.
    """

    path: Path
    architecture: str
    model: Any = attrs.field(repr=False, eq=False)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``model.named_parameters()``, detached."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()


def make_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Checkpoint:
    """Make a random model with its tokenizer, and save it.

    Args:
        folder: Where to save it; made if need be.
        architecture: A key of :data:`ARCHITECTURES`.
        seed: Of the weights; the tokenizer is always the same.
        dtype: Of the weights.
        config: Overrides of the model's config.

    Returns:
        The checkpoint, whose vocabulary is as large as its tokenizer.

    Raises:
        UnknownNameError: No such architecture; the message lists them.
        MissingDependencyError: transformers is not installed.
    """
    if architecture not in ARCHITECTURES:
        raise UnknownNameError(
            f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}"
        )
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "test checkpoints need transformers; pip install 'flashrl[huggingface]'"
        ) from error
    prefix, extra = ARCHITECTURES[architecture]
    tokenizer = _make_tokenizer()
    settings = {**_SIZES, **extra, **config, "vocab_size": len(tokenizer)}
    settings.setdefault("tie_word_embeddings", False)
    model_config = getattr(transformers, f"{prefix}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(model_config)
        # Biases and norms start equal everywhere; make them tell their channels apart.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Checkpoint(path=Path(folder), architecture=architecture, model=model)


def _make_tokenizer() -> Any:
    """A byte-level BPE tokenizer trained on one sentence."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "what is 12 + 34 ? the answer is 46 . question : answer ="
    tokenizer.train_from_iterator([text] * 8, trainer)
    # A multiple of 16, so that no engine pads the vocabulary.
    tokenizer.add_tokens([f"<extra{i}>" for i in range(-tokenizer.get_vocab_size() % 16)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=(
            "{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}answer ="
        ),
    )
