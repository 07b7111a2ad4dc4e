"""Tensors as trainers push them, turned into the tensors of a checkpoint.

A trainer's parameters differ from a checkpoint's in more than their names: they may be sharded
over ranks, split into a frozen weight and LoRA factors, or stacked over the experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from flashrl.core.names import normalize
from flashrl.errors import ShapeError, UnsupportedError, WeightUpdateError

__all__ = [
    "EXPERT_LAYOUTS",
    "ExpertLayout",
    "checkpoint_tensors",
    "find_layout",
    "gather",
    "merge_lora",
    "split_experts",
    "split_lora_name",
]

_LORA = re.compile(r"(?P<layer>.+)\.(?P<factor>lora_[A-Za-z_]+)(\.weight)?")
_EXPERT = re.compile(r".+\.(?P<block>[^.]+)\.experts\.0\.(?P<gate>[^.]+)\.weight")
_STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>gate_up_proj|down_proj)(?P<bias>_bias)?")


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, without its gradient.

    Args:
        tensor: Any tensor; a DTensor is gathered over its mesh, which every rank must join.

    Returns:
        A plain tensor; of one that is whole already, the same storage.
    """
    tensor = tensor.detach()
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()


def split_lora_name(name: str) -> tuple[str, str] | None:
    """The weight a LoRA parameter adapts, and which factor it is.

    Args:
        name: A parameter's name, wrapped or not.

    Returns:
        The weight's checkpoint name and PEFT's word for the factor; None for any other parameter.

    Example:
        >>> split_lora_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight")
        ('model.layers.0.mlp.up_proj.weight', 'lora_A')
        >>> split_lora_name("model.layers.0.mlp.up_proj.weight")
    """
    found = _LORA.fullmatch(normalize(name))
    return (f"{found['layer']}.weight", found["factor"]) if found else None


def merge_lora(base: Tensor, lora_a: Tensor, lora_b: Tensor, *, scale: float) -> Tensor:
    """The weight that a LoRA layer stands for, ``base + scale · B · A`` (arXiv 2106.09685).

    Float32, so that quantizing it is its only rounding; merging the same factors twice is what
    made miles#1087 wrong.

    Args:
        base: The frozen weight, [out, in].
        lora_a: The factor applied first, (rank, in).
        lora_b: The factor applied second, (out, rank).
        scale: alpha / rank, or alpha / √rank with rank-stabilised LoRA.

    Returns:
        float32, [out, in].

    Raises:
        ShapeError: The shapes do not fit together.

    Example:
        >>> merge_lora(torch.eye(2), torch.ones(1, 2), torch.tensor([[1.0], [0.0]]), scale=2.0)
        tensor([[3., 2.],
                [0., 1.]])
    """
    fits = base.ndim == lora_a.ndim == lora_b.ndim == 2 and lora_b.shape[1] == lora_a.shape[0]
    if not fits or base.shape != (lora_b.shape[0], lora_a.shape[1]):
        raise ShapeError(
            "LoRA needs base [out, in], lora_a (rank, in) and lora_b (out, rank), "
            f"got {tuple(base.shape)}, {tuple(lora_a.shape)} and {tuple(lora_b.shape)}"
        )
    return torch.addmm(base.float(), lora_b.float(), lora_a.float(), alpha=scale)


@attrs.frozen(kw_only=True)
class ExpertLayout:
    """How a trainer stacks the experts of a layer, and what the checkpoint calls each.

    Args:
        gate: The checkpoint's name of an expert's gate projection.
        up: Of its up projection.
        down: Of its down projection.
        transposed: Stacks are [experts, in, out] instead of [experts, out, in].
        interleaved: Gate and up alternate row by row; False puts all of gate first.
        block: The checkpoint's name for the trainer's ``mlp``, router included.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False
    block: str = "mlp"


EXPERT_LAYOUTS: Mapping[str, ExpertLayout] = MappingProxyType(
    {
        "qwen2_moe": ExpertLayout(),
        "mixtral": ExpertLayout(gate="w1", up="w3", down="w2", block="block_sparse_moe"),
        "gpt_oss": ExpertLayout(transposed=True, interleaved=True),
        "llama4_text": ExpertLayout(transposed=True),
    }
)
"""Stacks of transformers 5, by ``config.model_type``; most other types are as ``qwen2_moe``."""


def find_layout(names: Iterable[str]) -> ExpertLayout:
    """The layout whose names for single experts an engine has.

    Args:
        names: Checkpoint names of what the engine holds.

    Returns:
        The first of :data:`EXPERT_LAYOUTS` that calls an expert so, or that of ``qwen2_moe``.

    Example:
        >>> find_layout(["model.layers.0.block_sparse_moe.experts.0.w1.weight"]).up
        'w3'
    """
    found = {match.group("block", "gate") for match in map(_EXPERT.fullmatch, names) if match}
    layouts = EXPERT_LAYOUTS.values()
    return next((x for x in layouts if (x.block, x.gate) in found), EXPERT_LAYOUTS["qwen2_moe"])


def split_experts(
    name: str, tensor: Tensor, *, layout: ExpertLayout = EXPERT_LAYOUTS["qwen2_moe"]
) -> Iterator[tuple[str, Tensor]]:
    """Take a stack of experts apart into the checkpoint's tensors (SkyRL#1852).

    Args:
        name: The parameter's name; one that is no stack passes through, under the name of
            ``layout.block``.
        tensor: [experts, 2 · intermediate, hidden] for ``gate_up_proj``, [experts, hidden,
            intermediate] for ``down_proj``, or their biases without the last axis.
        layout: How the stack is laid out.

    Yields:
        Name and tensor of each expert's projections: views of the stack.

    Raises:
        ShapeError: The tensor is no stack, or gate and up have not the same size.

    Example:
        >>> stack = torch.arange(8.0).view(2, 4, 1)
        >>> for name, tensor in split_experts("model.layers.0.mlp.experts.gate_up_proj", stack):
        ...     print(name.removeprefix("model.layers.0.mlp."), tensor.flatten().tolist())
        experts.0.gate_proj.weight [0.0, 1.0]
        experts.0.up_proj.weight [2.0, 3.0]
        experts.1.gate_proj.weight [4.0, 5.0]
        experts.1.up_proj.weight [6.0, 7.0]
    """
    if layout.block != "mlp":
        name = name.replace(".mlp.", f".{layout.block}.")
    found = _STACKED.fullmatch(name)
    if found is None:
        yield name, tensor
        return
    leaf = "bias" if found["bias"] else "weight"
    if tensor.ndim != (2 if found["bias"] else 3):
        raise ShapeError(f"{name} must be a stack over experts, got {tuple(tensor.shape)}")
    if layout.transposed and not found["bias"]:
        tensor = tensor.transpose(1, 2)
    is_down = found["part"] == "down_proj"
    parts = (layout.down,) if is_down else (layout.gate, layout.up)
    if tensor.shape[1] % len(parts):
        raise ShapeError(f"{name} holds gate and up, so {tensor.shape[1]} rows must be even")
    for index, expert in enumerate(tensor):
        halves = _halves(expert, interleaved=layout.interleaved) if len(parts) == 2 else (expert,)
        for part, half in zip(parts, halves, strict=True):
            yield f"{found['experts']}.{index}.{part}.{leaf}", half


def checkpoint_tensors(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    lora_scale: float | None = None,
    layout: ExpertLayout = EXPERT_LAYOUTS["qwen2_moe"],
) -> Iterator[tuple[str, Tensor]]:
    """Turn a trainer's parameters into a checkpoint's tensors, one at a time.

    Wrappers leave the names, shards are gathered, LoRA factors are merged once into the weight
    they adapt, stacked experts are taken apart, and PEFT's frozen copies of modules it trains
    whole are left out.

    Args:
        named_tensors: As ``model.named_parameters()`` yields them.
        lora_scale: alpha / rank.  0 when the trainer has merged the factors into the base already;
            None, the default, when there are none.
        layout: How the trainer stacks experts.

    Yields:
        Checkpoint name and tensor.

    Raises:
        WeightUpdateError: After the last tensor, for the sender may wait for other ranks: a LoRA
            factor came without ``lora_scale`` or without the rest of its layer, or is of another
            kind than A and B of a linear layer; or a shape does not fit.  ``faults`` has each.
    """
    faults: dict[str, str] = {}
    pending: dict[str, dict[str, Tensor]] = {}
    for raw_name, tensor in named_tensors:
        if ".original_module." in raw_name:
            continue
        lora = split_lora_name(raw_name)
        weight, part = lora or (normalize(raw_name), "base")
        try:
            if lora:
                _check_lora(part, lora_scale)
            if lora_scale and (lora or ".base_layer.weight" in raw_name):
                parts = pending.setdefault(weight, {})
                parts[part] = gather(tensor).clone()  # the sender may overwrite its buffer
                if len(parts) == 3:
                    ready = [(weight, _merge(pending.pop(weight), lora_scale))]
                else:
                    ready = []
            else:
                ready = [] if lora else list(split_experts(weight, gather(tensor), layout=layout))
        except (ShapeError, UnsupportedError) as error:
            faults[raw_name] = str(error)
            continue
        yield from ready
    for weight, parts in pending.items():
        lacking = ", ".join(sorted({"base", "lora_A", "lora_B"} - parts.keys()))
        faults[weight] = f"came without its {lacking}; push a LoRA layer in one update"
    if faults:
        raise WeightUpdateError(
            "tensors could not be made into a checkpoint's: "
            + "; ".join(f"{name}: {fault}" for name, fault in list(faults.items())[:8])
            + (f"; and {len(faults) - 8} more" if len(faults) > 8 else ""),
            faults=faults,
        )


def _halves(tensor: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return tensor[::2], tensor[1::2]
    gate, up = tensor.chunk(2)
    return gate, up


def _merge(parts: Mapping[str, Tensor], scale: float) -> Tensor:
    return merge_lora(parts["base"], parts["lora_A"], parts["lora_B"], scale=scale)


def _check_lora(factor: str, scale: float | None) -> None:
    if scale is None:
        raise UnsupportedError(
            "a LoRA factor, and the engine loads whole weights; pass lora_scale=alpha / rank to "
            "merge it here, or 0 if it is merged into the base weight already"
        )
    if scale and factor not in ("lora_A", "lora_B"):
        raise UnsupportedError(
            "only the A and B factors of linear layers can be merged here; merge this adapter in "
            "the trainer (PEFT's merge_adapter) and pass lora_scale=0"
        )
