"""What "8 bit" means, said once: a frozen scheme, its presets, and the names people already use.

A scheme describes tensors, not an engine.  The field's words are compressed-tensors':
``num_bits``, ``type``, ``strategy``, ``block_structure``, ``targets``, ``ignore``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from flashrl.errors import SchemeError, UnknownNameError

if TYPE_CHECKING:
    import torch

__all__ = ["ALIASES", "PRESETS", "QuantScheme", "get_scheme", "scheme_names"]

_QMAX = {"int": 127.0, "float": 448.0}
_DTYPE = {"int": "int8", "float": "float8_e4m3fn"}


def _as_tuple(value: Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _as_block(value: Iterable[int] | None) -> tuple[int, int] | None:
    if value is None:
        return None
    block = tuple(value)
    if len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise SchemeError(
            f"block_structure must be two positive integers [rows, columns], got {value!r}"
        )
    return block


@attrs.frozen(kw_only=True)
class QuantScheme:
    """How linear weights are stored and multiplied during rollout.

    Args:
        name: The name the scheme answers to.
        num_bits: 8, or 16 for a scheme that quantizes nothing.
        type: ``"int"`` (symmetric int8, -127 to 127) or ``"float"`` (fp8 e4m3fn).
        strategy: Which weights share a scale: ``"channel"`` (one an output row), ``"tensor"``
            (one a shard), ``"block"`` (one a ``block_structure``).
        block_structure: ``(rows, columns)`` of a block; only with ``strategy="block"``.
        input_strategy: Which activations share a scale: ``"token"``, ``"tensor"``, or ``"group"``
            (a token's run of ``block_structure[1]`` channels).  Always computed as they come.
        dynamic: Recompute the weight scale at every update.  False keeps a profile's static scales
            and saturates what has outgrown them.
        targets: Module types or names to quantize; ``re:`` starts a regular expression.
        ignore: Module names to leave alone, in the same language; wins over ``targets``.
        prune_dead_neurons: Zero the norm channels that every linear behind the norm ignores after
            quantization, as the original's ``int8_prune`` did.
        kv_cache: ``None`` for the engine's own, or ``"fp8"``.

    Raises:
        SchemeError: The fields contradict each other.

    Example:
        >>> get_scheme("int8").qmax
        127.0
    """

    name: str
    num_bits: int = 8
    type: str = "int"
    strategy: str = "channel"
    block_structure: tuple[int, int] | None = attrs.field(default=None, converter=_as_block)
    input_strategy: str = "token"
    dynamic: bool = True
    targets: tuple[str, ...] = attrs.field(default=("Linear",), converter=_as_tuple)
    ignore: tuple[str, ...] = attrs.field(default=("lm_head",), converter=_as_tuple)
    prune_dead_neurons: bool = False
    kv_cache: str | None = None

    def __attrs_post_init__(self) -> None:
        faults = [
            f"{field} is {value!r}; allowed: {', '.join(map(repr, allowed))}"
            for field, value, allowed in (
                ("num_bits", self.num_bits, (8, 16)),
                ("type", self.type, ("int", "float")),
                ("strategy", self.strategy, ("channel", "tensor", "block")),
                ("input_strategy", self.input_strategy, ("token", "tensor", "group")),
                ("kv_cache", self.kv_cache, (None, "fp8")),
            )
            if value not in allowed
        ]
        if (self.strategy == "block") != (self.block_structure is not None):
            faults.append("block_structure goes with strategy='block', and only with it")
        if self.input_strategy == "group" and self.strategy != "block":
            faults.append("input_strategy='group' needs strategy='block' for its group size")
        if self.prune_dead_neurons and self.type != "int":
            faults.append("prune_dead_neurons is defined for int8 only")
        if faults:
            raise SchemeError(f"scheme {self.name!r}: " + "; ".join(faults))

    @property
    def quantized(self) -> bool:
        """Whether the scheme quantizes anything."""
        return self.num_bits == 8

    @property
    def qmax(self) -> float:
        """Largest magnitude the 8-bit type holds: 127 for int8, 448 for fp8 e4m3fn."""
        return _QMAX[self.type]

    @property
    def dtype(self) -> torch.dtype:
        """The 8-bit storage type."""
        import torch  # only here, so that reading a configuration costs no torch

        dtype: torch.dtype = getattr(torch, _DTYPE[self.type])
        return dtype

    def scale_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Shape of the scale of a weight of ``shape`` [out, in].

        Returns:
            ``(1,)`` a tensor, ``(out, 1)`` a channel, ``(ceil(out/r), ceil(in/c))`` a block.
        """
        rows, columns = tuple(shape)
        if self.strategy == "tensor":
            return (1,)
        if self.block_structure is None:
            return (rows, 1)
        r, c = self.block_structure
        return (-(-rows // r), -(-columns // c))

    def evolve(self, **changes: Any) -> QuantScheme:
        """A copy with some fields changed, validated anew.

        Raises:
            SchemeError: A field is unknown, or the result contradicts itself.
        """
        known = [f.name for f in attrs.fields(QuantScheme)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise SchemeError(f"no such scheme field: {unknown}; known: {known}")
        return attrs.evolve(self, **changes)


PRESETS: Mapping[str, QuantScheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            QuantScheme(name="bf16", num_bits=16),
            QuantScheme(name="int8"),
            QuantScheme(name="fp8_channel", type="float"),
            QuantScheme(name="fp8_tensor", type="float", strategy="tensor"),
            QuantScheme(
                name="fp8_block",
                type="float",
                strategy="block",
                block_structure=(128, 128),
                input_strategy="group",
            ),
        )
    }
)
"""The schemes this library defines, by name."""

ALIASES: Mapping[str, QuantScheme] = MappingProxyType(
    {
        "fp8": PRESETS["fp8_channel"],
        "fp8_vllm": PRESETS["fp8_tensor"],
        "fp8_fast": PRESETS["fp8_channel"],
        "fp8_vllm_fast": PRESETS["fp8_tensor"],
        "int8_fast": PRESETS["int8"],
        "int8_wo_prune": PRESETS["int8"],
        "int8_prune": PRESETS["int8"].evolve(name="int8_prune", prune_dead_neurons=True),
    }
)
"""Names from flash-llm-rl, and the scheme each one means here."""


def scheme_names() -> list[str]:
    """Every name :func:`get_scheme` takes, presets first."""
    return [*PRESETS, *ALIASES]


def get_scheme(scheme: str | QuantScheme) -> QuantScheme:
    """Look a scheme up by name; a scheme passes through.

    Args:
        scheme: A preset's name, one of the original project's names, or a ready scheme.

    Returns:
        The scheme.

    Raises:
        UnknownNameError: No scheme has that name; the message lists all.

    Example:
        >>> get_scheme("fp8_fast").name
        'fp8_channel'
    """
    if isinstance(scheme, QuantScheme):
        return scheme
    found = PRESETS.get(scheme) or ALIASES.get(scheme)
    if found is None:
        raise UnknownNameError(f"unknown scheme {scheme!r}; known: {', '.join(scheme_names())}")
    return found
