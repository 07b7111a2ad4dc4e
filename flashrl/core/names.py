"""Names of parameters and layers: what trainers call them, and which ones a scheme quantizes.

A trainer's wrappers add parts to a name that no checkpoint has (:func:`normalize`).  A multimodal
model carries its language model under a prefix that moved between releases, so names are compared
without it (:func:`canonical`).  :class:`LayerRules` reads ``targets`` and ``ignore`` as
compressed-tensors writes them, for layers that an engine fused as much as for their shards.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs

from flashrl.core.schemes import QuantScheme
from flashrl.errors import SchemeError, UnknownNameError

__all__ = ["FUSED", "KEEP", "LayerRules", "NameIndex", "canonical", "fused_name", "normalize"]

_WRAPPERS = frozenset(
    {
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",
        "_fpw_module",  # FairScale and old FSDP
        "_checkpoint_wrapped_module",  # activation checkpointing
        "base_layer",  # PEFT, around the frozen weight
    }
)
_OUTER = (("module",), ("pretrained_model",), ("base_model", "model"))  # DDP, TRL, PEFT
_ADAPTED = frozenset(  # PEFT; the adapter's name follows
    {
        "modules_to_save",
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
    }
)

_TEXT_PREFIXES = (
    "model.language_model.model.",
    "model.language_model.",  # transformers since 4.52
    "language_model.model.",  # transformers before, and vLLM
    "language_model.",
    "model.text_model.",
    "thinker.model.",
)
_TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "connector",
)

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
        "experts": ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
    }
)
"""Layers that engines fuse, and the checkpoint's layers in each, in order.

An engine's own ``packed_modules_mapping`` may stand in for it.  Experts are judged by the first."""

KEEP: tuple[str, ...] = (
    # A vision or audio tower, and what joins it to the language model (sglang#9596).
    r"re:(.*\.)?(visual|vision\w*|vit|image_\w+|img_\w+|audio\w*|speech\w*|mm_\w+"
    r"|multi_?modal_\w+|modality_\w+|embed_vision|embed_audio|connector|resampler)(\.|$)",
    r"re:(.*\.)?(lm_head|output_layer|embed_out)$",
    r"re:(.*\.)?(embed\w*|\w*embeddings?|wte|wpe)(\.|$)",
    r"re:(.*\.)?(\w*norm\d*|ln_\w+)(\.|$)",
    r"re:(.*\.)?(\w*router\w*(\..*)?|gate|\w*expert_gate)$",
    r"re:(.*\.)?conv1d$",
    r"re:(.*\.)?\w*bias$",
)
"""Layers that stay as they are whatever the targets say, in the language of ``ignore``."""


def normalize(name: str) -> str:
    """The checkpoint's name of a parameter or module that a trainer has wrapped.

    Args:
        name: As the trainer has it, through torch.compile, DDP, FSDP, activation checkpointing
            or PEFT, in any combination.

    Returns:
        The name without wrappers.  LoRA factors keep ``lora_A`` and lose the adapter's name.

    Example:
        >>> normalize("module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
        >>> normalize("base_model.model.lm_head.modules_to_save.default.weight")
        'lm_head.weight'
    """
    parts: list[str] = []
    previous = ""
    for part in name.split("."):
        adapter = previous in _ADAPTED and part != "weight"
        if not adapter and part not in _WRAPPERS and part != "modules_to_save":
            parts.append(part)
        previous = part
    while wrapper := next((w for w in _OUTER if tuple(parts[: len(w)]) == w), None):
        parts = parts[len(wrapper) :]
    return ".".join(parts)


def canonical(name: str) -> str:
    """The spelling under which names are compared: no wrapper, no multimodal prefix.

    Args:
        name: A parameter's or module's name, from a trainer, a checkpoint or an engine.

    Returns:
        The name the text-only model would have; towers lose a leading ``model.``.

    Example:
        >>> canonical("model.language_model.layers.0.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
        >>> canonical("language_model.lm_head.weight"), canonical("model.visual.merger.mlp.0")
        ('lm_head.weight', 'visual.merger.mlp.0')
    """
    name = normalize(name)
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            return rest if rest.split(".", 1)[0] == "lm_head" else f"model.{rest}"
    outer, _, rest = name.partition(".")
    if outer == "thinker" or (outer == "model" and rest.split(".", 1)[0] in _TOWERS):
        return rest
    return name


def fused_name(module_name: str, fused: Mapping[str, Sequence[str]] = FUSED) -> str | None:
    """The fused layer that a checkpoint's layer is a shard of.

    Args:
        module_name: Such as ``model.layers.0.self_attn.k_proj``.
        fused: Fused layers and their shards.

    Returns:
        The fused layer's name, or None.

    Example:
        >>> fused_name("model.layers.0.self_attn.k_proj")
        'model.layers.0.self_attn.qkv_proj'
    """
    parent, dot, leaf = module_name.rpartition(".")
    for whole, shards in fused.items():
        if leaf in shards and leaf != whole:
            return parent + dot + whole
    return None


def _as_tuple(texts: str | Iterable[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


@attrs.frozen
class NameIndex:
    """Finds the known spelling of a name, whatever wrappers or multimodal prefix it came with.

    Args:
        names: The known names, each as its owner spells it.

    Example:
        >>> index = NameIndex(["model.language_model.norm.weight"])
        >>> index.resolve("module.language_model.model.norm.weight")
        'model.language_model.norm.weight'
    """

    names: tuple[str, ...] = attrs.field(converter=_as_tuple)
    _spelling: dict[str, str] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        spelling = {canonical(name): name for name in self.names}
        spelling.update({name: name for name in self.names})
        object.__setattr__(self, "_spelling", spelling)

    def find(self, name: str) -> str | None:
        """The known spelling, or None."""
        stripped = normalize(name)
        return self._spelling.get(stripped) or self._spelling.get(canonical(stripped))

    def resolve(self, name: str) -> str:
        """The known spelling.

        Raises:
            UnknownNameError: There is none; the message lists the closest.
        """
        return self.resolve_all([name])[0]

    def resolve_all(self, names: Iterable[str]) -> list[str]:
        """The known spelling of each name.

        Raises:
            UnknownNameError: Some have none; one message lists all of them, each with the closest.
        """
        names = list(names)
        found = [self.find(name) for name in names]
        unknown = [name for name, known in zip(names, found, strict=True) if known is None]
        if unknown:
            raise UnknownNameError(
                f"{len(unknown)} of {len(names)} names are not known: "
                + "; ".join(self._suggest(name) for name in unknown[:8])
                + (f"; and {len(unknown) - 8} more" if len(unknown) > 8 else "")
            )
        return [name for name in found if name is not None]

    def _suggest(self, name: str) -> str:
        close = difflib.get_close_matches(canonical(name), self._spelling, n=3)
        spellings = dict.fromkeys(self._spelling[key] for key in close)
        hint = f"did you mean {' or '.join(spellings)}?" if close else "nothing is close"
        return f"{name} ({hint})"


@attrs.frozen(kw_only=True)
class LayerRules:
    """Which layers a scheme quantizes.

    An entry is a layer's name, the start of one up to a dot, a module type, or ``re:`` and a
    regular expression matched from the start of the name.  ``ignore`` wins over ``targets``.

    Args:
        targets: What to quantize, default every ``Linear``.
        ignore: What to leave alone of it, default ``lm_head``.
        keep: What stays as it is in any case, default :data:`KEEP`.
        fused: Fused layers and their shards, default :data:`FUSED`.

    Raises:
        SchemeError: An entry is empty or no regular expression.

    Example:
        >>> rules = LayerRules(ignore=["re:.*o_proj$", "model.layers.0"])
        >>> [rules.matches(f"model.layers.{i}.self_attn.qkv_proj") for i in (0, 1)]
        [False, True]
    """

    targets: tuple[str, ...] = attrs.field(default=("Linear",), converter=_as_tuple)
    ignore: tuple[str, ...] = attrs.field(default=("lm_head",), converter=_as_tuple)
    keep: tuple[str, ...] = attrs.field(default=KEEP, converter=_as_tuple, repr=False)
    fused: Mapping[str, Sequence[str]] = attrs.field(default=FUSED, repr=False)
    _matchers: Mapping[str, _Matcher] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        entries = {"targets": self.targets, "ignore": self.ignore, "keep": self.keep}
        matchers = {field: _Matcher.compile(field, texts) for field, texts in entries.items()}
        object.__setattr__(self, "_matchers", matchers)

    @classmethod
    def from_scheme(
        cls, scheme: QuantScheme, *, fused: Mapping[str, Sequence[str]] = FUSED
    ) -> LayerRules:
        """The rules of a scheme; one that quantizes nothing matches nothing.

        Args:
            scheme: Its ``targets`` and ``ignore`` are read.
            fused: Fused layers and their shards.
        """
        targets = scheme.targets if scheme.quantized else ()
        return cls(targets=targets, ignore=scheme.ignore, fused=fused)

    def matches(self, module_name: str, module_type: str = "Linear") -> bool:
        """Whether to quantize a layer.

        Args:
            module_name: The layer's name, or its weight's.
            module_type: Its class's name.

        Raises:
            SchemeError: The layer is fused, and the rules want some of its shards quantized and
                others not (vllm#11354).
        """
        name = normalize(module_name).removesuffix(".weight")
        if self._matchers["keep"].matches_name(name):
            return False
        parent, dot, leaf = name.rpartition(".")
        shards = [parent + dot + shard for shard in self.fused.get(leaf, ())]
        if not shards:
            whole = fused_name(name, self.fused)
            return self._wants([name, whole] if whole else [name], module_type)
        wanted = [shard for shard in shards if self._wants([shard, name], module_type)]
        if wanted and wanted != shards:
            unwanted = [shard for shard in shards if shard not in wanted]
            raise SchemeError(
                f"{name} is one layer in the engine, but targets and ignore quantize "
                f"{', '.join(wanted)} and not {', '.join(unwanted)}; "
                "name all of its parts or none of them"
            )
        return bool(wanted)

    def _wants(self, names: Iterable[str], module_type: str) -> bool:
        """Whether a layer known by several names is a target and not ignored."""
        targeted, ignored = (
            matcher.matches_type(module_type) or any(map(matcher.matches_name, names))
            for matcher in (self._matchers["targets"], self._matchers["ignore"])
        )
        return targeted and not ignored


@attrs.frozen
class _Matcher:
    """One list of entries, sorted by how each is compared."""

    texts: frozenset[str]
    literals: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def compile(cls, field: str, texts: Iterable[str]) -> _Matcher:
        texts = frozenset(texts)
        regexes = {text for text in texts if text.startswith("re:")}
        # llm-compressor names layers inside a wrapper that engines do not have:
        # "q_proj.linear" is q_proj (sglang#24927, #28018).
        names = [text.removesuffix(".linear") for text in texts - regexes]
        if not all(names) or "re:" in regexes:
            raise SchemeError(
                f"{field} has an empty entry; allowed: a layer's name, the start of one up to a "
                "dot, a module type such as 'Linear', or 're:' and a regular expression"
            )
        return cls(
            texts=texts,
            literals=frozenset(names) | frozenset(map(canonical, names)),
            patterns=tuple(_compile(field, text) for text in sorted(regexes)),
        )

    def matches_name(self, name: str) -> bool:
        return any(
            not self.literals.isdisjoint(_starts(spelling))
            or any(_fits(pattern, spelling) for pattern in self.patterns)
            for spelling in {name, canonical(name)}
        )

    def matches_type(self, module_type: str) -> bool:
        # What engines call linear layers and stacks of them: QKVParallelLinear, FusedMoE.
        linear = module_type.endswith(("Linear", "LinearBase", "FusedMoE", "EPMoE", "Experts"))
        return module_type in self.texts or (linear and "Linear" in self.texts)


def _compile(field: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text.removeprefix("re:"))
    except re.error as error:
        raise SchemeError(
            f"{field} has {text!r}, which is no regular expression: {error}; "
            "it must match a layer's name from its start, as in 're:.*mlp\\.down_proj$'"
        ) from error


def _starts(name: str) -> Iterator[str]:
    """The name and every start of it that ends before a dot."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _fits(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a regex matches a layer, or names the layer inside a ``.linear`` wrapper.

    A regex that any name with ``.linear`` satisfies says nothing about this one.
    """
    if pattern.match(name):
        return True
    return bool(pattern.match(f"{name}.linear")) and not pattern.match("?.linear")
