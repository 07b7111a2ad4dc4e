"""Dead channels: what ``int8_prune`` of flash-llm-rl removes.

Where a channel's column quantizes to zero in every weight that reads it, the channel no longer
reaches the model's output, but it still takes part in the scale of each token's activations.  The
original sets the norm's weight to zero there, so that the other channels get the finer scale
(``flash_quantize_with_prune`` in ``flash_rl/flash_quantization.py`` of yaof20/Flash-RL).  It needs
all of a model's weights at once; here they may come one at a time, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from flashrl.core.names import canonical

__all__ = ["DeadChannelPruner"]


@attrs.define(kw_only=True, eq=False)
class DeadChannelPruner:
    """Keeps the norms' weights at zero where nothing reads the channel any more.

    It remembers each norm's own weight and which channels each reader uses, so a channel that
    comes alive gets its weight back.  With tensor parallelism a rank sees some rows of a reader
    only: combine the ranks' tensors first.

    Args:
        groups: The weights that read each norm, by canonical name, routers included, as
            :func:`~flashrl.core.profiles.smoothing.find_groups` gives them.
        norm_offset: What the norms add to their weight before they multiply.

    Example:
        >>> pruner = DeadChannelPruner(groups={"norm.weight": ["up.weight"]})
        >>> pruner.load("norm.weight", torch.tensor([3.0, 5.0]))
        {'norm.weight': tensor([3., 5.])}
        >>> pruner.load("up.weight", torch.tensor([[7, 0]], dtype=torch.int8))
        {'norm.weight': tensor([3., 0.])}
    """

    groups: Mapping[str, tuple[str, ...]]
    norm_offset: float = 0.0
    _norms: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    _used: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    _norm_of: dict[str, str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._norm_of = {
            reader: norm for norm, readers in self.groups.items() for reader in readers
        }

    def load(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Take note of a tensor that was loaded.

        Args:
            name: Its name, in any spelling.
            tensor: A norm's weight (channels,), or a reader's as the engine now holds it: the int8
                values [out, in], or the weight itself where it is not quantized.

        Returns:
            The norm's weight to write into the engine now, by canonical name; empty when the
            tensor changes none.
        """
        name = canonical(name)
        if name in self._norm_of:
            used = (tensor != 0).flatten(0, -2).any(dim=0)
            before = self._used.get(name)
            self._used[name] = used
            name = self._norm_of[name]
            if name not in self._norms or (before is not None and torch.equal(before, used)):
                return {}
        elif name in self.groups and tensor.ndim == 1:
            self._norms[name] = tensor.detach().clone()
        else:
            return {}
        return {name: self._pruned(name)}

    def _pruned(self, norm: str) -> Tensor:
        weight, readers = self._norms[norm], self.groups[norm]
        if not self._used.keys() >= set(readers):
            return weight
        used = torch.stack([self._used[reader].to(weight.device) for reader in readers]).any(dim=0)
        return torch.where(used, weight, 0.0 - self.norm_offset)
