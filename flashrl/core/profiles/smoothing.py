"""Which weights share a smoothing factor, and how large it should be.

Smoothing moves magnitude from activations into weights without changing the model: what produces
a channel is divided by ``s``, everything that reads it is multiplied by ``s``
(SmoothQuant, arXiv 2211.10438).  A reader left out would change the model, so a layer with a weight
this module does not know is not smoothed at all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import attrs
import torch
from torch import Tensor, nn

from flashrl.core.names import canonical
from flashrl.errors import NonFiniteError, ShapeError

__all__ = [
    "Smoothing",
    "collect_activation_amax",
    "compute_smoothing",
    "find_groups",
    "norm_offset",
]

_logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(.*\blayers\.\d+)\.(.+?)(?:\.weight)?")

_EXPERT = r"((experts\.\d+|experts|shared_experts?)\.)?"
_ATTENTION = r"(self_attn|attention|attn|linear_attn)\."
_MLP = r"(mlp|block_sparse_moe|feed_forward)\."
_ATTENTION_READERS = re.compile(
    rf"{_ATTENTION}((q|k|v|qkv|q_a)_proj|kv_a_proj_with_mqa|fused_qkv_a_proj"
    r"|in_proj_(qkv|qkvz|z|ba|b|a))"
)
_MLP_READERS = re.compile(
    rf"{_MLP}({_EXPERT}((gate|up|gate_up)_proj|w1|w3)|gate|router|shared_expert_gate)"
)
_OTHER_READERS = re.compile(  # of what attention or activation put out, not of a norm
    rf"{_ATTENTION}((o|out|dense|q_b|kv_b)_proj|dense|conv1d)|{_MLP}{_EXPERT}(down_proj|w2)"
)

_OFFSET_NORMS = frozenset(
    {"gemma", "gemma2", "gemma3", "recurrent_gemma", "vaultgemma", "qwen3_next", "qwen3_5"}
    | {"qwen3_5_moe", "minimax_m3_vl"}
)


@attrs.frozen(kw_only=True, eq=False)
class Smoothing:
    """What smoothing does to one tensor.

    Args:
        columns: Multiplies the last axis, the channels a weight reads, (in,); None leaves it.
        rows: Divides the first axis, the channels a norm, weight or bias puts out, (out,).
        offset: What a norm adds to its weight before it multiplies; matrices have none.
    """

    columns: Tensor | None = None
    rows: Tensor | None = None
    offset: float = 0.0

    def apply(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Smooth a tensor.

        Args:
            tensor: A norm's weight (channels,), a linear weight [out, in], a stack of such, or a
                bias (out,); any device.
            dtype: dtype of the result, default the tensor's own; the arithmetic is float32.

        Returns:
            A new tensor of the same shape.

        Example:
            >>> Smoothing(rows=torch.tensor([2.0, 4.0])).apply(torch.tensor([1.0, 1.0]))
            tensor([0.5000, 0.2500])
        """
        values = tensor.to(torch.float32, copy=True)
        if self.rows is not None:
            rows = self.rows.to(values.device).view(-1, *[1] * (values.ndim - 1))
            offset = self.offset if values.ndim == 1 else 0.0
            values.add_(offset).div_(rows).sub_(offset)
        if self.columns is not None:
            values.mul_(self.columns.to(values.device))
        return values.to(dtype or tensor.dtype)


def norm_offset(config: Mapping[str, object]) -> float:
    """What a model's norms add to their weight before they multiply: 1 in Gemma, else 0.

    Args:
        config: The model's ``config.json``.

    Example:
        >>> norm_offset({"model_type": "gemma3_text"}), norm_offset({"model_type": "qwen2"})
        (1.0, 0.0)
    """
    model_type = str(config.get("model_type", "")).removesuffix("_text")
    return 1.0 if model_type in _OFFSET_NORMS else 0.0


def find_groups(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """The smoothing groups of a decoder: what produces channels, and every weight that reads them.

    A norm feeds attention or MLP.  ``up_proj`` feeds ``down_proj``, and ``v_proj`` feeds ``o_proj``
    where both have the same number of channels, which grouped-query attention has not.

    Args:
        shapes: Shape of every parameter of the model, by name.

    Returns:
        Readers by source, all canonical parameter names, in the order of ``shapes``.

    Example:
        >>> layer = "model.layers.0."
        >>> find_groups({layer + "input_layernorm.weight": (8,),
        ...              layer + "self_attn.qkv_proj.weight": (24, 8)})
        {'model.layers.0.input_layernorm.weight': ('model.layers.0.self_attn.qkv_proj.weight',)}
    """
    layers: dict[str, dict[str, str]] = {}
    shape_of = {canonical(name): tuple(shape) for name, shape in shapes.items()}
    for name in shape_of:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(found[1], {})[found[2]] = name
    return {
        members[source]: tuple(members[reader] for reader in readers)
        for members in layers.values()
        for source, readers in _layer_groups({k: shape_of[v] for k, v in members.items()})
        if readers
    }


def compute_smoothing(activation_amax: Tensor, weight_amax: Tensor, *, alpha: float) -> Tensor:
    """SmoothQuant's factor per channel, amax|X_j|^α / amax|W_j|^(1-α) (arXiv 2211.10438, eq. 4).

    Args:
        activation_amax: Largest magnitude of each channel's activations, (channels,).
        weight_amax: Largest magnitude of each channel over every weight that reads it, (channels,).
        alpha: How much moves into the weights, from 0 to 1.

    Returns:
        float32, (channels,), all finite and positive; 1 where the channel or its weights are zero.

    Raises:
        ShapeError: The shapes differ.
        NonFiniteError: An input holds NaN or infinity.
        ValueError: ``alpha`` is outside 0 to 1.

    Example:
        >>> compute_smoothing(torch.tensor([16.0, 0.0]), torch.tensor([1.0, 2.0]), alpha=0.5)
        tensor([4., 1.])
    """
    if activation_amax.shape != weight_amax.shape:
        raise ShapeError(
            f"activations have {tuple(activation_amax.shape)} channels, "
            f"weights {tuple(weight_amax.shape)}"
        )
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    activations, weights = activation_amax.float(), weight_amax.float()
    if not bool((torch.isfinite(activations) & torch.isfinite(weights)).all()):
        raise NonFiniteError("the largest magnitudes to smooth by hold NaN or infinity")
    factor = activations.pow(alpha) / weights.pow(1.0 - alpha)
    dead = (activations <= 0) | (weights <= 0) | ~torch.isfinite(factor) | (factor <= 0)
    return torch.where(dead, 1.0, factor)


@contextmanager
def collect_activation_amax(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Watch a model run, and keep the largest magnitude of each channel.

    Padding counts: run it on prompts without any.

    Args:
        model: Any torch model; its linear layers and norms are watched.

    Yields:
        A growing mapping from canonical weight names to float32 (channels,): of a norm, the
        channels it puts out; of a linear layer, those it reads.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> with collect_activation_amax(torch.nn.Sequential(layer)) as amax:
        ...     _ = layer(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))
        >>> amax["0.weight"]
        tensor([2., 3.])
    """
    amax: dict[str, Tensor] = {}

    def record(name: str, activations: Tensor) -> None:
        channels = activations.detach().reshape(-1, activations.shape[-1])
        if channels.numel():
            latest = channels.abs().amax(dim=0).float().cpu()
            amax[name] = torch.maximum(amax[name], latest) if name in amax else latest

    handles = []
    for module_name, module in model.named_modules():
        name = canonical(f"{module_name}.weight")
        if isinstance(module, nn.Linear):
            handles.append(
                module.register_forward_pre_hook(lambda _, args, n=name: record(n, args[0]))
            )
        elif type(module).__name__.endswith("Norm") and hasattr(module, "weight"):
            handles.append(
                module.register_forward_hook(lambda _, args, out, n=name: record(n, out))
            )
    try:
        yield MappingProxyType(amax)
    finally:
        for handle in handles:
            handle.remove()


def _layer_groups(
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Sequence[str]]]:
    """Source and readers of each group of one decoder layer, without prefix and ``.weight``."""
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    attention = [name for name in matrices if _ATTENTION_READERS.fullmatch(name)]
    mlp = [name for name in matrices if _MLP_READERS.fullmatch(name)]
    known = {_block(name) for name in [*attention, *mlp]}
    strangers = [
        name
        for name in matrices
        if name not in attention and name not in mlp and not _OTHER_READERS.fullmatch(name)
    ]
    for norm, readers in _norms(shapes, attention, mlp):
        others = known - {_block(reader) for reader in readers}
        doubtful = [name for name in strangers if _block(name) not in others]
        doubtful += [name for name in readers if shapes[name][-1] != shapes[norm][0]]
        if doubtful:
            _logger.warning("%s is not smoothed, unsure of %s", norm, ", ".join(doubtful))
        else:
            yield norm, readers
    for source, reader in _pairs(matrices):
        if shapes[source][0] == shapes[reader][1] and len(shapes[source]) == 2:
            yield source, [reader]


def _block(name: str) -> str:
    return name.split(".", 1)[0]


def _norms(
    names: Container[str], attention: list[str], mlp: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """Which norm feeds what: the names mean different things in different families."""
    if "input_layernorm" not in names:
        return  # OLMo 2 normalizes what a block puts out
    if "pre_feedforward_layernorm" in names:  # Gemma 2 and 3, whose post_attention_layernorm is not
        yield "input_layernorm", attention
        yield "pre_feedforward_layernorm", mlp
    elif "post_attention_layernorm" in names:
        yield "input_layernorm", attention
        yield "post_attention_layernorm", mlp
    else:  # Cohere: both blocks read the same norm
        yield "input_layernorm", [*attention, *mlp]


def _pairs(matrices: Iterable[str]) -> Iterator[tuple[str, str]]:
    names = set(matrices)
    for name in matrices:
        for source, reader in (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2")):
            parent, _, leaf = name.rpartition(".")
            if leaf == source and f"{parent}.{reader}" in names:
                yield name, f"{parent}.{reader}"
