"""Pushed tensors, against what transformers itself writes to disk and float64 products."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flashrl.core.quantize import dequantize, quantize_into
from flashrl.core.schemes import get_scheme
from flashrl.core.updates.pushes import (
    EXPERT_LAYOUTS,
    checkpoint_tensors,
    gather,
    merge_lora,
    split_experts,
    split_lora_name,
)
from flashrl.errors import ShapeError, WeightUpdateError

UP = "model.layers.0.mlp.up_proj"


def quantized(weight: torch.Tensor) -> torch.Tensor:
    scheme = get_scheme("int8")
    out, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0], 1)
    quantize_into(weight, out, scale, scheme=scheme)
    return dequantize(out, scale, scheme=scheme)


class TestGather:
    def test_a_sharded_tensor_is_gathered(self, tmp_path) -> None:
        """A DTensor over two ranks comes back whole on both; a bias passes through."""
        script = f"""
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from flashrl.core.updates.pushes import gather
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(10.0).view(5, 2)
sharded = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
assert sharded.to_local().shape[0] < 5
gathered = gather(sharded)
assert type(gathered) is torch.Tensor and torch.equal(gathered, whole)
assert not gathered.requires_grad
dist.destroy_process_group()
"""
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs

    def test_a_plain_tensor_passes_through(self) -> None:
        bias = torch.nn.Parameter(torch.ones(3))
        assert gather(bias).data_ptr() == bias.data_ptr()
        assert not gather(bias).requires_grad


class TestLora:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            (f"base_model.model.{UP}.lora_A.default.weight", (f"{UP}.weight", "lora_A")),
            (f"module.{UP}.lora_B.weight", (f"{UP}.weight", "lora_B")),
            (
                "model.embed_tokens.lora_embedding_A.default",
                ("model.embed_tokens.weight", "lora_embedding_A"),
            ),
            (
                f"{UP}.lora_magnitude_vector.default.weight",
                (f"{UP}.weight", "lora_magnitude_vector"),
            ),
            (f"{UP}.base_layer.weight", None),
            (f"{UP}.bias", None),
        ],
    )
    def test_its_names_are_recognised(self, name: str, expected: tuple[str, str] | None) -> None:
        assert split_lora_name(name) == expected

    def test_merged_equals_quantizing_the_sum_once(self) -> None:
        """miles#1087: base + s·B·A, quantized once."""
        base = torch.randn(6, 8, dtype=torch.bfloat16)
        a = torch.randn(2, 8, dtype=torch.bfloat16)
        b = torch.randn(6, 2, dtype=torch.bfloat16)
        expected = (base.double() + 0.5 * (b.double() @ a.double())).float()
        merged = merge_lora(base, a, b, scale=0.5)
        assert torch.allclose(merged, expected, rtol=1e-6, atol=1e-6)
        pushed = dict(
            checkpoint_tensors(
                [
                    (f"base_model.model.{UP}.base_layer.weight", base),
                    (f"base_model.model.{UP}.lora_A.default.weight", a),
                    (f"base_model.model.{UP}.lora_B.default.weight", b),
                ],
                lora_scale=0.5,
            )
        )
        assert list(pushed) == [f"{UP}.weight"]
        assert torch.equal(quantized(pushed[f"{UP}.weight"]), quantized(expected))

    def test_factors_may_come_in_any_order_from_a_reused_buffer(self) -> None:
        base, a, b = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
        parts = {"lora_B.default.weight": b, "base_layer.weight": base, "lora_A.default.weight": a}

        def pushes():
            for suffix, tensor in parts.items():
                buffer = tensor.clone()
                yield f"{UP}.{suffix}", buffer
                buffer.fill_(float("nan"))
            yield "model.norm.weight", torch.ones(3)

        pushed = dict(checkpoint_tensors(pushes(), lora_scale=2.0))
        expected = base.double() + 2.0 * (b.double() @ a.double())
        assert torch.allclose(pushed[f"{UP}.weight"].double(), expected, atol=1e-5)
        assert pushed["model.norm.weight"].tolist() == [1.0, 1.0, 1.0]

    def test_factors_without_a_scale_are_an_error_at_the_end(self) -> None:
        """Loading the base alone would be silently wrong; stopping would leave ranks waiting."""
        lora = f"{UP}.lora_A.x.weight"
        stream = checkpoint_tensors([(lora, torch.ones(2, 3)), ("lm_head.weight", torch.ones(1))])
        assert next(stream)[0] == "lm_head.weight"
        with pytest.raises(WeightUpdateError, match=r"lora_scale=alpha / rank") as error:
            next(stream)
        assert list(error.value.faults) == [lora]

    def test_factors_that_are_merged_already_are_left_out(self) -> None:
        base = torch.ones(2, 2)
        pushed = checkpoint_tensors(
            [(f"{UP}.base_layer.weight", base), (f"{UP}.lora_A.x.weight", base)], lora_scale=0.0
        )
        assert [name for name, _ in pushed] == [f"{UP}.weight"]

    def test_a_lost_factor_is_an_error_that_names_it(self) -> None:
        parts = {"base_layer": torch.ones(2, 2), "lora_A.x": torch.ones(1, 2)}
        pushes = [(f"{UP}.{part}.weight", tensor) for part, tensor in parts.items()]
        with pytest.raises(WeightUpdateError, match="lora_B") as error:
            list(checkpoint_tensors(pushes, lora_scale=1.0))
        assert list(error.value.faults) == [f"{UP}.weight"]

    def test_other_kinds_of_adapter_are_refused(self) -> None:
        pushes = [(f"{UP}.lora_magnitude_vector.x.weight", torch.ones(2))]
        with pytest.raises(WeightUpdateError, match="merge_adapter"):
            list(checkpoint_tensors(pushes, lora_scale=1.0))

    def test_many_faults_are_cut_and_kept(self) -> None:
        pushes = [(f"{UP}.{i}.lora_A.x.weight", torch.ones(1, 1)) for i in range(10)]
        with pytest.raises(WeightUpdateError, match="and 2 more") as error:
            list(checkpoint_tensors(pushes))
        assert len(error.value.faults) == 10

    @pytest.mark.parametrize(
        "shapes",
        [((4, 3), (2, 3), (4, 1)), ((4, 3), (2, 4), (4, 2)), ((4, 3), (2, 3), (5, 2)), ((4,),) * 3],
    )
    def test_shapes_that_do_not_fit_are_an_error(self, shapes) -> None:
        with pytest.raises(ShapeError, match=r"lora_a \(rank, in\)"):
            merge_lora(*(torch.ones(shape) for shape in shapes), scale=1.0)


class TestExperts:
    @pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral"])
    def test_split_equals_what_transformers_writes_to_disk(self, model_type, make_experts) -> None:
        """SkyRL#1852: per-expert results, names and all."""
        model, on_disk = make_experts(model_type)
        stacked = dict(model.named_parameters())
        assert any(tensor.ndim == 3 for tensor in stacked.values())
        pushed = dict(checkpoint_tensors(stacked.items(), layout=EXPERT_LAYOUTS[model_type]))
        assert pushed.keys() == on_disk.keys()
        for name, tensor in on_disk.items():
            assert torch.equal(pushed[name], tensor), name

    def test_a_stack_quantizes_as_its_experts(self) -> None:
        """SkyRL#1852: [experts, n, k]."""
        stack = torch.randn(2, 8, 5)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        for part, weight in split_experts(name, stack):
            index, half = int(part.split(".")[5]), slice(0, 4) if ".gate_" in part else slice(4, 8)
            assert torch.equal(quantized(weight), quantized(stack[index, half].clone()))

    def test_gpt_oss_is_transposed_and_interleaved(self) -> None:
        """Splitting gives the projections that GptOssExperts itself multiplies with."""
        module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
        config = pytest.importorskip("transformers").GptOssConfig(
            hidden_size=4, intermediate_size=3, num_local_experts=2
        )
        experts = module.GptOssExperts(config)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        hidden = torch.randn(1, 4)
        weights = dict(
            checkpoint_tensors(
                ((f"mlp.experts.{name}", p) for name, p in experts.named_parameters()),
                layout=EXPERT_LAYOUTS["gpt_oss"],
            )
        )
        part = {
            name: torch.nn.functional.linear(
                hidden,
                weights[f"mlp.experts.1.{name}.weight"],
                weights[f"mlp.experts.1.{name}.bias"],
            )
            for name in ("gate_proj", "up_proj")
        }
        fused = hidden @ experts.gate_up_proj[1] + experts.gate_up_proj_bias[1]
        assert torch.allclose(part["gate_proj"], fused[..., ::2])
        assert torch.allclose(part["up_proj"], fused[..., 1::2])
        down = torch.nn.functional.linear(
            fused[..., ::2],
            weights["mlp.experts.1.down_proj.weight"],
            weights["mlp.experts.1.down_proj.bias"],
        )
        expected = fused[..., ::2] @ experts.down_proj[1] + experts.down_proj_bias[1]
        assert torch.allclose(down, expected, atol=1e-6)

    @pytest.mark.parametrize(
        ("part", "shape"), [("gate_up_proj", (4, 2)), ("gate_up_proj", (2, 3, 4))]
    )
    def test_what_is_no_stack_is_an_error(self, part: str, shape: tuple[int, ...]) -> None:
        name = f"model.layers.0.mlp.experts.{part}"
        with pytest.raises(ShapeError, match=part):
            list(split_experts(name, torch.ones(shape)))
        with pytest.raises(WeightUpdateError, match=part) as error:
            list(checkpoint_tensors([(name, torch.ones(shape))]))
        assert list(error.value.faults) == [name]


def test_a_module_trained_whole_is_pushed_once() -> None:
    """PEFT keeps the frozen original beside the copy it trains."""
    pushed = checkpoint_tensors(
        [
            ("base_model.model.lm_head.original_module.weight", torch.zeros(1)),
            ("base_model.model.lm_head.modules_to_save.default.weight", torch.ones(1)),
        ]
    )
    assert [(name, tensor.item()) for name, tensor in pushed] == [("lm_head.weight", 1.0)]
