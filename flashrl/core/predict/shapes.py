"""What a model's ``config.json`` says about its size: matrices, experts, and the KV cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from flashrl.errors import ConfigError, UnsupportedError

__all__ = ["MODELS", "ModelShape"]

# hidden, layers, heads, KV heads, intermediate, vocabulary, tied: Qwen2.5 technical report
# (arXiv:2412.15115, table 1) and the models' own config.json.
_QWEN25 = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": (5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": (5120, 64, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": (8192, 80, 64, 8, 29568, 152064, False),
}

_PLAIN_MLP = frozenset({"gpt_neox", "opt", "phi", "starcoder2", "nemotron"})  # up and down, no gate


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model, dense or with experts.

    Args:
        name: For people.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; fewer than the query heads with grouped queries.
        head_dim: Width of a head.
        intermediate_size: Width of a dense layer's MLP.
        vocab_size: Rows of the embedding.
        tie_word_embeddings: The lm_head is the embedding.
        gated: An MLP has three matrices (gate, up, down) rather than two.
        num_moe_layers: Layers whose MLP is a mixture of experts.
        num_experts: Experts in such a layer.
        num_experts_per_token: Experts that a token visits.
        expert_intermediate_size: Width of an expert's MLP.
        shared_intermediate_size: Width of the MLP that every token visits beside its experts.
    """

    name: str = "model"
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    gated: bool = True
    num_moe_layers: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0

    @classmethod
    def from_config(
        cls, config: ModelShape | Mapping[str, Any] | str | os.PathLike[str]
    ) -> ModelShape:
        """Read the sizes from a model's configuration.

        Args:
            config: The content of a ``config.json``, a path to one or to its folder, or the name
                of a Qwen2.5 size, such as ``"qwen2.5-7b"``; a shape passes through.

        Returns:
            The shape.  Sliding windows count as full attention.

        Raises:
            ConfigError: No such file or size, no JSON, or sizes missing or impossible; all of
                them are named.
            UnsupportedError: Attention of a kind whose cost this model does not describe.

        Example:
            >>> round(ModelShape.from_config("qwen2.5-7b").num_parameters / 1e9, 1)
            7.6
        """
        if isinstance(config, ModelShape):
            return config
        if isinstance(config, Mapping):
            return _from_mapping(config, name=str(config.get("model_type", "model")))
        known = str(config).lower().removeprefix("qwen/").removesuffix("-instruct")
        if known in MODELS and not Path(config).exists():
            return MODELS[known]
        return _from_mapping(_read(Path(config)), name=_name(Path(config)))

    @property
    def num_linear_parameters(self) -> int:
        """Weights that a scheme quantizes: projections, MLPs and experts, not embeddings."""
        moe = self.num_experts * self.expert_parameters + self._mlp(self.shared_intermediate_size)
        return self.num_dense_parameters + self.num_moe_layers * moe

    @property
    def num_dense_parameters(self) -> int:
        """Linear weights outside a mixture of experts: every token multiplies all of them."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * heads
        num_dense_layers = self.num_layers - self.num_moe_layers
        return self.num_layers * attention + num_dense_layers * self._mlp(self.intermediate_size)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert in one layer."""
        return self._mlp(self.expert_intermediate_size)

    @property
    def num_head_parameters(self) -> int:
        """Weights of the lm_head, shared with the embedding or not."""
        return self.vocab_size * self.hidden_size

    @property
    def num_unquantized_parameters(self) -> int:
        """Weights that stay in 16 bit: embedding, lm_head and routers.

        Norms and biases, under a thousandth of a model, are left out.
        """
        embeddings = self.num_head_parameters * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_moe_layers * self.hidden_size * self.num_experts

    @property
    def num_parameters(self) -> int:
        """All weights, but for norms and biases."""
        return self.num_linear_parameters + self.num_unquantized_parameters

    def compute_active_parameters(self) -> int:
        """Linear weights that one token is multiplied with."""
        return self.num_dense_parameters + self.num_moe_layers * (
            self.num_experts_per_token * self.expert_parameters
            + self._mlp(self.shared_intermediate_size)
        )

    def compute_touched_parameters(self, tokens: float) -> float:
        """Linear weights that a batch of tokens reads, if the router spreads them evenly.

        An expert is missed by a token with probability ``1 - k/n``, so ``tokens`` tokens read
        ``n (1 - (1 - k/n) ** tokens)`` of ``n`` experts in the mean.
        """
        if not self.num_moe_layers:
            return self.num_dense_parameters
        missed: float = (1 - self.num_experts_per_token / self.num_experts) ** tokens
        experts = self.num_experts * (1 - missed) * self.expert_parameters
        shared = self._mlp(self.shared_intermediate_size)
        return self.num_dense_parameters + self.num_moe_layers * (experts + shared)

    def _mlp(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden_size * width


def _name(path: Path) -> str:
    return path.resolve().parent.name if path.suffix == ".json" else path.resolve().name


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read a model configuration from {str(path)!r} ({error}); give a folder with "
            f"a config.json, a config.json, or one of {', '.join(MODELS)}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: a model configuration is a JSON object, not {config!r:.40}")
    return config


def _from_mapping(config: Mapping[str, Any], *, name: str) -> ModelShape:
    config = config.get("text_config") or config  # multimodal: the language model inside
    _refuse_unknown_attention(config, name)
    reader = _Reader(config)
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    kv_heads = reader.optional("num_key_value_heads") or heads
    if kv_heads and heads % kv_heads:
        reader.faults.append(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    shape = ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=reader.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=reader.optional("head_dim") or hidden // max(heads, 1),
        intermediate_size=reader.size("intermediate_size"),
        vocab_size=reader.size("vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", _tied_by_default(config))),
        gated=config.get("model_type") not in _PLAIN_MLP,
    )
    num_experts = reader.optional("num_local_experts", "num_experts", "n_routed_experts")
    if num_experts:
        shape = _with_experts(shape, reader, num_experts)
    if reader.faults:
        raise ConfigError(f"model configuration of {name!r}: " + "; ".join(reader.faults))
    return shape


def _with_experts(shape: ModelShape, reader: _Reader, num_experts: int) -> ModelShape:
    """The same with experts, by the keys of Mixtral, Qwen and DeepSeek."""
    visited = reader.size("num_experts_per_tok")
    if visited > num_experts:
        reader.faults.append(f"num_experts_per_tok {visited} is more than {num_experts} experts")
    width = reader.optional("moe_intermediate_size") or shape.intermediate_size
    shared = reader.optional("shared_expert_intermediate_size")
    step = reader.optional("decoder_sparse_step") or 1
    dense = reader.layers("mlp_only_layers") | set(range(reader.optional("first_k_dense_replace")))
    return attrs.evolve(
        shape,
        num_experts=num_experts,
        num_experts_per_token=visited,
        expert_intermediate_size=width,
        shared_intermediate_size=shared or width * reader.optional("n_shared_experts"),
        num_moe_layers=sum(
            layer not in dense and (layer + 1) % step == 0 for layer in range(shape.num_layers)
        ),
    )


class _Reader:
    """Reads sizes and keeps every fault, so that all are reported together."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.faults: list[str] = []

    def size(self, key: str) -> int:
        """A size that must be there."""
        if self._config.get(key) is None:
            self.faults.append(f"{key} is missing")
            return 0
        return self._integer(key, at_least=1)

    def optional(self, *keys: str) -> int:
        """The first of the sizes that is there, or 0."""
        found = [key for key in keys if self._config.get(key) is not None]
        return self._integer(found[0], at_least=0) if found else 0

    def layers(self, key: str) -> set[int]:
        """A list of layer numbers, or none."""
        value = self._config.get(key) or []
        if not (isinstance(value, list) and all(isinstance(layer, int) for layer in value)):
            self.faults.append(f"{key} is {value!r}; it must be a list of layer numbers")
            return set()
        return set(value)

    def _integer(self, key: str, *, at_least: int) -> int:
        value = self._config[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self.faults.append(f"{key} is {value!r}; it must be an integer, {at_least} or more")
            return 0
        return value


def _tied_by_default(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type", "")).startswith("gemma")


def _refuse_unknown_attention(config: Mapping[str, Any], name: str) -> None:
    kinds = set(map(str, config.get("layer_types") or ())) - {"full_attention", "sliding_attention"}
    if config.get("kv_lora_rank"):
        kinds.add("multi-head latent attention")
    if kinds:
        raise UnsupportedError(
            f"{name!r} has {', '.join(sorted(kinds))}, whose cost is not modelled; "
            "only full and sliding attention over a cache of keys and values is"
        )


MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        name: ModelShape(
            name=name,
            hidden_size=hidden,
            num_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            intermediate_size=intermediate,
            vocab_size=vocab,
            tie_word_embeddings=tied,
        )
        for name, (hidden, layers, heads, kv_heads, intermediate, vocab, tied) in _QWEN25.items()
    }
)
"""Shapes known without any file, by name."""
