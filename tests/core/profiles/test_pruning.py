"""Dead channels, against the original's rule written out as a loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrl.core.profiles.pruning import DeadChannelPruner

LAYER = "model.layers.0"
NORM, MLP_NORM = f"{LAYER}.input_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight"
Q, K, V = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP, DOWN = (f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
GROUPS = {NORM: (Q, K, V), MLP_NORM: (GATE, UP), UP: (DOWN,)}


def int8(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8)


def pruned_by_loop(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """The original's rule: a norm's channel is zeroed if every reader's column is all zero."""
    result = {}
    for norm in (NORM, MLP_NORM):
        result[norm] = weights[norm].tolist()
        for j in range(len(result[norm])):
            if all(int(weights[r][i, j]) == 0 for r in GROUPS[norm] for i in range(2)):
                result[norm][j] = 0.0
    return result


columns = st.lists(st.sampled_from([0, 0, 3, -7]), min_size=3, max_size=3)


class TestDeadChannelPruner:
    @given(
        st.fixed_dictionaries({name: st.tuples(columns, columns) for name in (Q, K, V, GATE, UP)}),
        st.permutations([NORM, MLP_NORM, Q, K, V, GATE, UP, DOWN]),
    )
    def test_any_order_ends_where_the_original_does(self, rows, order) -> None:
        """flash-llm-rl's pruning needed all tensors at once: KeyError on a push of one."""
        weights = {name: int8(list(map(list, value))) for name, value in rows.items()}
        weights |= {NORM: torch.tensor([1.0, 2.0, 3.0]), MLP_NORM: torch.tensor([4.0, 5.0, 6.0])}
        weights[DOWN] = int8([[0, 0]])
        pruner = DeadChannelPruner(groups=GROUPS)
        engine: dict[str, torch.Tensor] = {}
        for name in order:
            engine |= pruner.load(f"module.{name}", weights[name])
        assert {name: tensor.tolist() for name, tensor in engine.items()} == pruned_by_loop(weights)

    def test_a_channel_that_comes_alive_gets_its_weight_back(self) -> None:
        pruner = DeadChannelPruner(groups={NORM: (Q,)})
        pruner.load(NORM, torch.tensor([2.0, 3.0]))
        assert pruner.load(Q, int8([[1, 0]]))[NORM].tolist() == [2.0, 0.0]
        assert pruner.load(Q, int8([[5, 0]])) == {}
        assert pruner.load(Q, int8([[0, 4]]))[NORM].tolist() == [0.0, 3.0]
        assert pruner.load(NORM, torch.tensor([8.0, 9.0]))[NORM].tolist() == [0.0, 9.0]

    def test_nothing_is_pruned_before_every_reader_was_seen(self) -> None:
        pruner = DeadChannelPruner(groups={NORM: (Q, K)})
        pruner.load(Q, int8([[0, 0]]))
        assert pruner.load(NORM, torch.tensor([2.0, 3.0]))[NORM].tolist() == [2.0, 3.0]

    def test_the_senders_buffer_may_change(self) -> None:
        pruner = DeadChannelPruner(groups={NORM: (Q,)})
        buffer = torch.tensor([2.0, 3.0])
        pruner.load(NORM, buffer)
        buffer.fill_(float("nan"))
        assert pruner.load(Q, int8([[1, 0]]))[NORM].tolist() == [2.0, 0.0]

    def test_a_router_keeps_the_channels_it_reads(self) -> None:
        router = f"{LAYER}.mlp.gate.weight"
        pruner = DeadChannelPruner(groups={MLP_NORM: (router, UP)})
        pruner.load(MLP_NORM, torch.ones(2))
        pruner.load(router, torch.tensor([[0.0, 1e-3]]))
        assert pruner.load(UP, int8([[0, 0]]))[MLP_NORM].tolist() == [0.0, 1.0]

    def test_an_offset_norm_is_switched_off_by_its_offset(self) -> None:
        """Gemma's norms multiply by 1 + weight."""
        pruner = DeadChannelPruner(groups={NORM: (Q,)}, norm_offset=1.0)
        pruner.load(NORM, torch.tensor([2.0, 3.0]))
        assert pruner.load(Q, int8([[1, 0]]))[NORM].tolist() == [2.0, -1.0]

    @pytest.mark.parametrize("name", [DOWN, "lm_head.weight", NORM.replace("weight", "bias")])
    def test_other_tensors_change_nothing(self, name: str) -> None:
        pruner = DeadChannelPruner(groups=GROUPS)
        assert pruner.load(name, int8([[0, 0]])) == {}


def test_pruning_leaves_the_layers_output_alone() -> None:
    """The dead channel feeds nothing, but it no longer sets the scale of the activations."""
    weight = int8([[3, 0, -2], [1, 0, 5]]).float()
    pruner = DeadChannelPruner(groups={NORM: (Q,)})
    norm = torch.tensor([1.0, 100.0, 2.0])
    pruner.load(NORM, norm)
    pruned = pruner.load(Q, weight.to(torch.int8))[NORM]
    for hidden in itertools.product((-1.0, 0.5), repeat=3):
        x = torch.tensor(hidden)
        assert torch.equal(weight @ (x * norm), weight @ (x * pruned))
        assert (x * pruned).abs().amax() < (x * norm).abs().amax() / 20
