"""The update ledger: what it lets through, what it remembers, what it raises."""

from __future__ import annotations

import pytest
import torch

from flashrl.core.interfaces import WeightInfo
from flashrl.core.schemes import get_scheme
from flashrl.core.updates import UpdateLedger, load_each
from flashrl.errors import NonFiniteError, WeightUpdateError

INFOS = {
    "model.embed_tokens.weight": WeightInfo(
        shape=(8, 4), dtype=torch.bfloat16, aliases=("lm_head.weight",)
    ),
    "model.layers.0.mlp.up_proj.weight": WeightInfo(shape=(6, 4), dtype=torch.int8),
    "model.norm.weight": WeightInfo(shape=(4,), dtype=torch.bfloat16),
}
GOOD = {name: torch.ones(info.shape) for name, info in INFOS.items()}


def admit(ledger: UpdateLedger, tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, _ in ledger.admit(tensors.items())]


def test_a_full_update_passes_in_any_order_and_spelling() -> None:
    ledger = UpdateLedger(INFOS)
    assert admit(ledger, {f"module.{name}": t for name, t in reversed(GOOD.items())}) == [
        *reversed(GOOD)
    ]
    ledger.finish()


def test_an_alias_stands_for_its_tensor() -> None:
    ledger = UpdateLedger(INFOS)
    tensors = {**GOOD, "lm_head.weight": torch.ones(8, 4)}
    del tensors["model.embed_tokens.weight"]
    assert "model.embed_tokens.weight" in admit(ledger, tensors)
    ledger.finish()


def test_a_multimodal_prefix_is_understood() -> None:
    ledger = UpdateLedger(INFOS)
    admit(ledger, {n.replace("model.", "model.language_model.", 1): t for n, t in GOOD.items()})
    ledger.finish()


def test_every_fault_is_collected_with_what_never_came() -> None:
    ledger = UpdateLedger(INFOS)
    passed = admit(
        ledger,
        {
            "model.layers.0.mlp.up_prj.weight": torch.ones(6, 4),
            "model.norm.weight": torch.ones(5),
            "model.embed_tokens.weight": torch.ones(8, 4, dtype=torch.int64),
        },
    )
    assert passed == []
    with pytest.raises(WeightUpdateError) as caught:
        ledger.finish()
    error = caught.value
    assert set(error.faults) == {
        "model.layers.0.mlp.up_prj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    }
    assert error.missing == ("model.layers.0.mlp.up_proj.weight",)
    assert (
        "close: model.layers.0.mlp.up_proj.weight"
        in error.faults["model.layers.0.mlp.up_prj.weight"]
    )
    assert "(5,)" in str(error)
    assert "int64" in str(error)
    assert isinstance(error, RuntimeError)


def test_a_stray_lora_factor_is_one_fault_among_others() -> None:
    """It is raised by finish(), so the engine's own faults are not lost."""
    ledger = UpdateLedger(INFOS)
    factor = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert admit(ledger, {factor: torch.ones(1, 4), **GOOD}) == [*GOOD]
    ledger.refuse({"model.norm.weight": "holds NaN"})
    with pytest.raises(WeightUpdateError, match=r"lora_scale") as caught:
        ledger.finish()
    assert caught.value.faults.keys() == {factor, "model.norm.weight"}


def test_a_refused_tensor_has_not_arrived() -> None:
    ledger = UpdateLedger(INFOS)
    admit(ledger, GOOD)
    ledger.refuse({"model.norm.weight": "holds NaN"})
    with pytest.raises(WeightUpdateError, match=r"2 of 3.*\n.*model\.norm\.weight: holds NaN"):
        ledger.finish()


def test_a_sharded_tensor_is_gathered() -> None:
    """DTensor: whatever has ``full_tensor()``."""

    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return torch.full((4,), 3.0)

    ledger = UpdateLedger(INFOS)
    shard = torch.ones(2).as_subclass(Sharded)
    [(name, tensor)] = ledger.admit([("model.norm.weight", shard)])
    assert name == "model.norm.weight"
    assert torch.equal(tensor, torch.full((4,), 3.0))


def test_load_each_goes_on_past_a_refusal() -> None:
    loaded = []

    def load(name: str, tensor: torch.Tensor) -> None:
        if tensor.isnan().any():
            raise NonFiniteError(f"{name} holds NaN")
        loaded.append(name)

    tensors = {"a": torch.ones(1), "b": torch.full((1,), torch.nan), "c": torch.ones(1)}
    with pytest.raises(WeightUpdateError) as caught:
        load_each(tensors.items(), load)
    assert loaded == ["a", "c"]
    assert caught.value.faults == {"b": "b holds NaN"}


def test_an_unexpected_error_is_not_swallowed() -> None:
    def load(name: str, tensor: torch.Tensor) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError):
        load_each([("a", torch.ones(1))], load)


def test_long_lists_are_cut() -> None:
    infos = {f"w{i}": WeightInfo(shape=(1,), dtype=torch.bfloat16) for i in range(30)}
    with pytest.raises(WeightUpdateError, match="and 22 more"):
        UpdateLedger(infos).finish()


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_stacked_experts_come_under_the_engines_names(model_type: str, make_experts) -> None:
    """An engine that has a checkpoint's names takes what a trainer stacks (SkyRL#1852)."""
    model, on_disk = make_experts(model_type)
    ledger = UpdateLedger(
        {name: WeightInfo(shape=tuple(t.shape), dtype=t.dtype) for name, t in on_disk.items()}
    )
    for name, tensor in ledger.admit(model.named_parameters()):
        assert torch.equal(tensor, on_disk[name]), name
    ledger.finish()


# Weights that the sender quantized.

UP = "model.layers.0.mlp.up_proj.weight"
QUANTIZED = {
    **INFOS,
    UP: WeightInfo(shape=(6, 4), dtype=torch.int8, scheme=get_scheme("int8")),
}
HALVES = {UP: torch.ones(6, 4, dtype=torch.int8), f"{UP}_scale": torch.ones(6, 1)}


@pytest.mark.parametrize("backwards", [False, True])
def test_both_halves_of_a_quantized_weight_make_it_whole(backwards: bool) -> None:
    ledger = UpdateLedger(QUANTIZED, quantized=True)
    pairs = list({**GOOD, **HALVES}.items())
    pushed = {f"module.{name}": t for name, t in (reversed(pairs) if backwards else pairs)}
    assert set(admit(ledger, pushed)) == {*GOOD, *HALVES}
    ledger.finish()
    assert ledger.arrived == set(QUANTIZED)


@pytest.mark.parametrize(
    ("half", "lacks"), [(UP, "its scale"), (f"{UP}_scale", "its values")], ids=["values", "scale"]
)
def test_half_a_quantized_weight_is_a_fault(half: str, lacks: str) -> None:
    ledger = UpdateLedger(QUANTIZED, quantized=True)
    pushed = {name: tensor for name, tensor in GOOD.items() if name != UP}
    admit(ledger, {**pushed, half: HALVES[half]})
    with pytest.raises(WeightUpdateError, match=lacks) as caught:
        ledger.finish()
    assert set(caught.value.faults) == {UP}
    assert not caught.value.missing


def test_a_half_that_the_engine_refused_is_its_fault_alone() -> None:
    ledger = UpdateLedger(QUANTIZED, quantized=True)
    admit(ledger, {**GOOD, **HALVES})
    ledger.refuse({f"{UP}_scale": "holds NaN"})
    with pytest.raises(WeightUpdateError, match="holds NaN") as caught:
        ledger.finish()
    assert set(caught.value.faults) == {f"{UP}_scale"}
    assert UP not in caught.value.arrived


def test_halves_of_what_is_not_quantized_are_refused() -> None:
    ledger = UpdateLedger(QUANTIZED, quantized=True)
    norm = "model.norm.weight"
    assert admit(ledger, {norm: torch.ones(4, dtype=torch.int8), "a.weight_scale": GOOD[UP]}) == []
    assert "16 bit" in ledger.faults[norm]
    assert "no such weight" in ledger.faults["a.weight_scale"]


def test_an_engine_that_takes_16_bit_only_is_sent_no_halves() -> None:
    ledger = UpdateLedger(QUANTIZED)
    assert admit(ledger, HALVES) == []
    assert "torch.int8" in ledger.faults[UP]
