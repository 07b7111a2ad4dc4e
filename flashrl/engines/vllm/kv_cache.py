"""Scales of an FP8 KV cache that follow the weights.

vLLM's own are 1.0 unless a checkpoint brings some, and 1.0 again after every reload.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from flashrl.core.cache_scales import bound_norm, bound_projection, choose_cache_scale
from flashrl.core.schemes import QuantScheme
from flashrl.engines.vllm import compat
from flashrl.errors import UnsupportedError

__all__ = ["CacheScales"]

logger = logging.getLogger(__name__)

_ROWS = 1024  # of a projection, dequantized at a time
_E4M3 = ("fp8", "fp8_e4m3")


@attrs.frozen(kw_only=True, eq=False)
class _Attention:
    """An attention layer, and what its queries, keys and values come from.

    Args:
        name: Its name in the engine.
        layer: vLLM's ``Attention``, which holds the scales.
        projection: The layer that makes q, k and v, in this order.
        norm: The norm before it.
        query_norm: A norm of each head's query; None where there is none.
        key_norm: A norm of each head's key.
        rotary: The rotary embedding of queries and keys.
    """

    name: str
    layer: Any
    projection: Any
    norm: Any
    query_norm: Any
    key_norm: Any
    rotary: Any

    @property
    def sources(self) -> set[str]:
        """Names of the parameters that the scales depend on."""
        parent = self.name.rpartition(".")[0]
        block = parent.rpartition(".")[0]
        parts = ("qkv_proj.weight", "qkv_proj.bias", "q_norm.weight", "k_norm.weight")
        return {f"{block}.input_layernorm.weight", *(f"{parent}.{part}" for part in parts)}

    def bounds(self) -> Tensor:
        """Largest magnitude of a query, a key and a value, float32, (3,)."""
        num_queries, num_keys, num_values = _sizes(self.layer)
        return torch.stack(
            [
                self._bound_turned(0, num_queries, self.query_norm),
                self._bound_turned(num_queries, num_keys, self.key_norm),
                self._bound_rows(num_queries + num_keys, num_values),
            ]
        )

    def _bound_turned(self, start: int, size: int, norm: Any) -> Tensor:
        """The bound of queries or keys after the rotary embedding, which may scale too (YaRN)."""
        amplitude = _amplitude(self.rotary)
        if norm is not None:
            return bound_norm(_factors(norm)) * amplitude
        # A rotation may put all of a pair of channels into one of them.
        return self._bound_rows(start, size) * math.sqrt(2) * amplitude

    def _bound_rows(self, start: int, size: int) -> Tensor:
        factors, bias = _factors(self.norm), getattr(self.projection, "bias", None)
        bounds = []
        for first in range(start, start + size, _ROWS):
            rows = slice(first, min(first + _ROWS, start + size))
            part = None if bias is None else bias[rows]
            weight = _read_rows(self.projection, rows)
            bounds.append(bound_projection(weight, factors, bias=part).max())
        return torch.stack(bounds).max()


class CacheScales:
    """The scales of a model whose KV cache is in FP8, recomputed when its weights change.

    Args:
        attentions: Its attention layers; their scales are set anew where vLLM resets them.
    """

    def __init__(self, attentions: Collection[_Attention]) -> None:
        self._attentions = tuple(attentions)
        self._held: dict[str, tuple[float, ...]] = {}
        for attention in self._attentions:
            layer = attention.layer
            layer.process_weights_after_loading = functools.partial(self._process, attention)

    @classmethod
    def of(cls, model: nn.Module, scheme: QuantScheme) -> CacheScales | None:
        """Those of a model; None if its cache is 16-bit.

        Args:
            model: vLLM's model.
            scheme: How the engine is quantized.

        Raises:
            UnsupportedError: The cache is FP8 and its scales cannot be bounded, or it is not and
                the scheme wants it so; the message says how to start the engine.
        """
        layers = {n: m for n, m in model.named_modules() if compat.is_attention(m)}
        quantized = {n: m for n, m in layers.items() if _is_quantized(m)}
        if not quantized:
            if scheme.kv_cache:
                raise UnsupportedError(
                    f"scheme {scheme.name!r} asks for an fp8 KV cache, and the engine was not "
                    "started with one; start it with kv_cache_dtype='fp8', or with "
                    "launch_args('vllm', scheme)"
                )
            return None
        return cls([_find_sources(model, name, layer) for name, layer in quantized.items()])

    def remove(self) -> None:
        """Let vLLM set scales as it does; what they are stays."""
        for attention in self._attentions:
            del attention.layer.process_weights_after_loading

    def refresh(self, loaded: Collection[str] | None = None) -> None:
        """Make scales follow weights; those of weights that are not finite stay.

        Args:
            loaded: Names of the engine's parameters that changed; all without it.
        """
        changed = [
            attention
            for attention in self._attentions
            if loaded is None or not attention.sources.isdisjoint(loaded)
        ]
        if not changed:
            return
        with torch.no_grad():
            bounds = torch.stack([attention.bounds() for attention in changed]).tolist()
        moved = []
        for attention, found in zip(changed, bounds, strict=True):
            before = self._held.get(attention.name)
            # Whoever loads weights that are not finite says which.
            finite = all(map(math.isfinite, found))
            scales = tuple(map(choose_cache_scale, found)) if finite else before
            if scales is None:
                continue
            _set(attention.layer, scales)
            if before not in (None, scales):
                moved.append(attention.name)
            self._held[attention.name] = scales
        if moved:
            logger.warning(
                "the KV cache's scales changed in %d layers (%s first): what was cached before is "
                "read wrongly now; reset the prefix cache and abort requests that still run",
                len(moved),
                moved[0],
            )

    def describe(self) -> dict[str, list[float]]:
        """Each attention layer's scales of queries, keys and values, as its kernels read them."""
        return {
            attention.name: [float(getattr(attention.layer, f"_{part}_scale")) for part in "qkv"]
            for attention in self._attentions
        }

    def _process(self, attention: _Attention, *args: Any, **kwargs: Any) -> None:
        """Stand in the place of an attention layer's ``process_weights_after_loading``."""
        layer = attention.layer
        type(layer).process_weights_after_loading(layer, *args, **kwargs)
        self.refresh(attention.sources)


def _is_quantized(layer: Any) -> bool:
    return str(layer.kv_cache_dtype).startswith("fp8")


def _sizes(layer: Any) -> tuple[int, int, int]:
    """How many channels queries, keys and values have on this rank."""
    value_size = getattr(layer, "head_size_v", layer.head_size)
    return (
        layer.num_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
        layer.num_kv_heads * value_size,
    )


def _find_sources(model: nn.Module, name: str, layer: Any) -> _Attention:
    """What an attention layer's inputs come from, where they are made as in Llama, Qwen or Gemma.

    Raises:
        UnsupportedError: They are made in another way, or the cache is of another type.
    """
    modules = dict(model.named_modules())
    parent = name.rpartition(".")[0]
    block = parent.rpartition(".")[0]
    found = _Attention(
        name=name,
        layer=layer,
        projection=modules.get(f"{parent}.qkv_proj"),
        norm=modules.get(f"{block}.input_layernorm"),
        query_norm=modules.get(f"{parent}.q_norm"),
        key_norm=modules.get(f"{parent}.k_norm"),
        rotary=modules.get(f"{parent}.rotary_emb"),
    )
    norms = [norm for norm in (found.query_norm, found.key_norm) if norm is not None]
    for wrong, what in (
        (layer.kv_cache_dtype not in _E4M3, f"a cache of type {layer.kv_cache_dtype}"),
        (getattr(layer, "kv_sharing_target_layer_name", None), "a cache shared between layers"),
        (found.projection is None, f"no {parent}.qkv_proj"),
        (not _is_rms_norm(found.norm), f"no RMSNorm {block}.input_layernorm"),
        (not all(map(_is_rms_norm, norms)), "a norm of queries or keys that is no RMSNorm"),
        (
            any(
                norm.weight.numel() != layer.head_size for norm in norms if hasattr(norm, "weight")
            ),
            "a norm over several heads",
        ),
        (compat.has_lora(), "LoRA adapters, which add to keys and values"),
        (
            getattr(layer, "calculate_kv_scales", False),
            "calculate_kv_scales, which computes them once, from the first batch",
        ),
        (
            not compat.reads_cache_scales(layer),
            "an attention backend that keeps them in CUDA graphs (FLASH_ATTN and TRITON_ATTN do "
            "not)",
        ),
    ):
        if wrong:
            raise UnsupportedError(
                f"{name}: the scales of an FP8 KV cache are computed from the weights, and this "
                f"engine has {what}; start it with kv_cache_dtype='auto', or without that"
            )
    rows = sum(_sizes(layer))
    if _num_rows(found.projection) != rows:
        raise UnsupportedError(
            f"{parent}.qkv_proj has {_num_rows(found.projection)} rows on this rank, and q, k and "
            f"v make {rows}: the scales of an FP8 KV cache cannot be computed from it; start the "
            "engine with kv_cache_dtype='auto'"
        )
    return found


def _is_rms_norm(norm: Any) -> bool:
    return type(norm).__name__ in ("RMSNorm", "GemmaRMSNorm") and hasattr(norm, "weight")


def _factors(norm: Any) -> Tensor:
    """What a norm multiplies by, float32; Gemma's keep it less one."""
    weight: Tensor = norm.weight.detach().float()
    return weight + 1 if type(norm).__name__ == "GemmaRMSNorm" else weight


def _amplitude(rotary: Any) -> float:
    cache = getattr(rotary, "cos_sin_cache", None)
    return 1.0 if cache is None else max(1.0, _largest(cache))


@functools.lru_cache(maxsize=8)
def _largest(cache: Tensor) -> float:
    return float(cache.float().abs().max())


def _storage_of(projection: Any) -> Any:
    storages = getattr(getattr(projection, "quant_method", None), "storages", ())
    return storages[0] if storages else None


def _num_rows(projection: Any) -> int:
    storage = _storage_of(projection)
    return int((projection.weight if storage is None else storage.weight).shape[0])


def _read_rows(projection: Any, rows: slice) -> Tensor:
    storage = _storage_of(projection)
    if storage is not None:
        read: Tensor = storage.read(rows)
        return read
    weight: Tensor = projection.weight[rows]
    return weight.detach().float()


def _set(layer: Any, scales: Sequence[float]) -> None:
    """Set scales where kernels read them: on the device, on the host and as numbers."""
    for part, scale in zip("qkv", scales, strict=True):
        getattr(layer, f"_{part}_scale").fill_(scale)
        setattr(layer, f"_{part}_scale_float", scale)
        on_host = getattr(layer, f"_{part}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(scale)
