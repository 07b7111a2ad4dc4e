"""Reading real safetensors files: sharded, spelled differently, damaged, packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flashrl.core.profiles.checkpoints import Checkpoint
from flashrl.errors import ProfileError, SchemeError, UnknownNameError

UP = "model.layers.0.mlp.up_proj"


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def int8_weight(scale_shape: tuple[int, ...] = (4, 1)) -> dict[str, torch.Tensor]:
    return {
        f"{UP}.weight": torch.ones(4, 3, dtype=torch.int8),
        f"{UP}.weight_scale": torch.ones(scale_shape),
    }


class TestReading:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        """Two shards and an index, as save_pretrained writes them."""
        weight_map = {}
        for i in range(2):
            name = f"model.layers.{i}.mlp.up_proj.weight"
            weight_map[name] = file = f"model-0000{i + 1}-of-00002.safetensors"
            save_file({name: torch.full((2, 3), float(i), dtype=torch.bfloat16)}, tmp_path / file)
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        return tmp_path

    def test_a_sharded_checkpoint_is_one(self, sharded: Path) -> None:
        for path in (sharded, sharded / "model.safetensors.index.json"):
            checkpoint = Checkpoint.open(path)
            assert checkpoint.config == {"model_type": "llama"}
            assert [name for name, _ in checkpoint] == list(checkpoint.headers)
            tensor = checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
            assert tensor.dtype == torch.bfloat16
            assert tensor.tolist() == [[1.0] * 3] * 2
            assert checkpoint.header("model.layers.1.mlp.up_proj.weight").shape == (2, 3)

    def test_a_single_file_and_a_folder_without_index(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        assert len(Checkpoint.open(sharded).headers) == 2
        assert len(Checkpoint.open(sharded / "model-00001-of-00002.safetensors").headers) == 1

    def test_names_are_found_in_any_spelling(self, tmp_path: Path) -> None:
        name = "language_model.model.norm.weight"
        write(tmp_path, {name: torch.ones(2)})
        (tmp_path / "config.json").unlink()
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.config == {}
        assert "model.language_model.norm.weight" in checkpoint
        assert checkpoint.tensor("model.norm.weight").tolist() == [1.0, 1.0]
        with pytest.raises(UnknownNameError, match=f"did you mean {name}"):
            checkpoint.tensor("model.nrom.weight")

    def test_a_tensor_outlives_its_file(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.arange(4.0)}))
        tensor = checkpoint.tensor("a")
        tensor.add_(1)
        (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
        assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]

    def test_a_missing_shard_is_an_error_that_names_it(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ProfileError, match="model-00002-of-00002"):
            Checkpoint.open(sharded)

    def test_no_checkpoint_is_an_error(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "absent", tmp_path / "model.bin"):
            with pytest.raises(ProfileError, match="no safetensors checkpoint"):
                Checkpoint.open(path)

    def test_damage_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
        with pytest.raises(ProfileError, match="no readable safetensors"):
            Checkpoint.open(tmp_path)
        write(tmp_path, {"a": torch.ones(1)})
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ProfileError, match="not valid JSON"):
            Checkpoint.open(tmp_path)
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(ProfileError, match="JSON object"):
            Checkpoint.open(tmp_path)


class TestWeightScheme:
    @pytest.mark.parametrize(
        ("dtype", "scale_name", "scale_shape", "expected"),
        [
            (torch.int8, "weight_scale", (4, 1), "int8"),
            (torch.float8_e4m3fn, "weight_scale", (4, 1), "fp8_channel"),
            (torch.float8_e4m3fn, "weight_scale", (4,), "fp8_channel"),
            (torch.float8_e4m3fn, "weight_scale", (1,), "fp8_tensor"),
            (torch.float8_e4m3fn, "weight_scale", (), "fp8_tensor"),
            (torch.float8_e4m3fn, "weight_scale_inv", (2, 1), "fp8_block"),
            (torch.float8_e4m3fn, "weight_scale", (1, 1), "fp8_block"),
        ],
    )
    def test_each_format(self, dtype, scale_name, scale_shape, expected, tmp_path: Path) -> None:
        rows = 4 if 4 in scale_shape else 200
        tensors = {
            f"{UP}.weight": torch.ones(rows, 3).to(dtype),
            f"{UP}.{scale_name}": torch.ones(scale_shape),
            "model.norm.weight": torch.ones(3),
        }
        config = {"quantization_config": {"ignore": ["lm_head"]}}
        checkpoint = Checkpoint.open(write(tmp_path, tensors, **config))
        scheme = checkpoint.weight_scheme()
        assert scheme.name == expected
        assert scheme.ignore == ("lm_head",)
        assert checkpoint.quantized_weights() == (f"{UP}.weight",)
        assert checkpoint.scale_name(f"{UP}.weight") == f"{UP}.{scale_name}"
        assert checkpoint.scale_name("model.norm.weight") is None

    def test_an_unquantized_checkpoint_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError, match="no quantized weight"):
            Checkpoint.open(write(tmp_path, {"a.weight": torch.ones(2)})).weight_scheme()

    @pytest.mark.parametrize("extra", ["weight_packed", "weight_zero_point"])
    def test_other_formats_are_refused(self, extra: str, tmp_path: Path) -> None:
        tensors = {**int8_weight(), f"{UP}.{extra}": torch.ones(1)}
        with pytest.raises(ProfileError, match=f"{extra}; only symmetric"):
            Checkpoint.open(write(tmp_path, tensors)).weight_scheme()

    def test_a_scale_beside_a_16_bit_weight_is_refused(self, tmp_path: Path) -> None:
        tensors = {**int8_weight(), f"{UP}.weight": torch.ones(4, 3)}
        with pytest.raises(ProfileError, match=r"has a scale but is F32 \[4, 3\]"):
            Checkpoint.open(write(tmp_path, tensors)).weight_scheme()

    def test_mixed_schemes_are_refused(self, tmp_path: Path) -> None:
        other = {name.replace("up", "down"): t for name, t in int8_weight((1,)).items()}
        with pytest.raises(ProfileError, match="one profile holds one scheme"):
            Checkpoint.open(write(tmp_path, {**int8_weight(), **other})).weight_scheme()

    def test_a_scheme_nothing_here_stores_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SchemeError, match="int tensor weights; known: "):
            Checkpoint.open(write(tmp_path, int8_weight((1,)))).weight_scheme()
