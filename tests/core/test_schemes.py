"""Schemes: presets, the original project's names, and validation."""

from __future__ import annotations

import pytest
import torch

from flashrl.core.schemes import ALIASES, PRESETS, QuantScheme, get_scheme, scheme_names
from flashrl.errors import FlashRLError, SchemeError, UnknownNameError


@pytest.mark.parametrize(
    ("alias", "meaning"),
    [
        ("fp8", "fp8_channel"),
        ("fp8_vllm", "fp8_tensor"),
        ("fp8_fast", "fp8_channel"),
        ("fp8_vllm_fast", "fp8_tensor"),
        ("int8_fast", "int8"),
        ("int8_wo_prune", "int8"),
    ],
)
def test_original_names_are_aliases(alias: str, meaning: str) -> None:
    assert get_scheme(alias) is PRESETS[meaning]


def test_int8_prune_prunes_and_is_otherwise_int8() -> None:
    pruned = get_scheme("int8_prune")
    assert pruned.prune_dead_neurons
    assert pruned.evolve(name="int8", prune_dead_neurons=False) == PRESETS["int8"]


@pytest.mark.parametrize("name", ["int9", "", "INT8", "fp8_chanel"])
def test_unknown_scheme_lists_the_known(name: str) -> None:
    """The original returned a function of the wrong arity for an unknown scheme."""
    with pytest.raises(UnknownNameError) as caught:
        get_scheme(name)
    assert isinstance(caught.value, LookupError)
    assert all(known in str(caught.value) for known in scheme_names())
    assert {*PRESETS, *ALIASES} == set(scheme_names())


@pytest.mark.parametrize(
    ("scheme", "qmax", "dtype"),
    [("int8", 127.0, torch.int8), ("fp8_channel", 448.0, torch.float8_e4m3fn)],
)
def test_range_and_storage(scheme: str, qmax: float, dtype: torch.dtype) -> None:
    assert (get_scheme(scheme).qmax, get_scheme(scheme).dtype) == (qmax, dtype)


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [("int8", (300, 1)), ("fp8_tensor", (1,)), ("fp8_block", (3, 2))],
)
def test_scale_shape_covers_ragged_edges(scheme: str, shape: tuple[int, ...]) -> None:
    assert get_scheme(scheme).scale_shape((300, 200)) == shape


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(SchemeError) as caught:
        QuantScheme(name="odd", num_bits=4, type="complex", strategy="group", kv_cache="int3")
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(word in message for word in ("num_bits", "type", "strategy", "kv_cache", "'odd'"))


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "block"},
        {"block_structure": (128, 128)},
        {"input_strategy": "group"},
        {"type": "float", "prune_dead_neurons": True},
        {"strategy": "block", "block_structure": (0, 128)},
        {"strategy": "block", "block_structure": (128,)},
    ],
)
def test_contradictions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(SchemeError):
        get_scheme("int8").evolve(**fields)


def test_evolve_refuses_an_unknown_field_and_lists_the_known() -> None:
    with pytest.raises(SchemeError, match=r"nbits.*num_bits"):
        get_scheme("int8").evolve(nbits=8)


def test_a_scheme_passes_through_and_is_frozen() -> None:
    scheme = get_scheme("int8").evolve(ignore="re:.*lm_head")
    assert get_scheme(scheme) is scheme
    assert scheme.ignore == ("re:.*lm_head",)
    with pytest.raises(AttributeError):
        scheme.num_bits = 16  # type: ignore[misc]


def test_bf16_quantizes_nothing() -> None:
    assert not get_scheme("bf16").quantized
    assert issubclass(SchemeError, FlashRLError)
