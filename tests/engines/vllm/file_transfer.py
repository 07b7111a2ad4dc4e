"""A weight-transfer engine for vLLM whose wire is a file: vLLM's protocol without NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class InitInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str = ""


class FileTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for file in sorted(Path(update_info.path).glob("*.safetensors")):
            for pair in load_file(file).items():
                self.model.load_weights(iter([pair]))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Before 0.29 the sender's side stood in the same class."""
        save_file(dict(iterator), Path(trainer_args["path"]) / "weights.safetensors")

    def shutdown(self) -> None:
        pass


def transfer_arguments() -> dict[str, Any]:
    """Engine arguments that choose it."""
    if "file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("file", FileTransferEngine)
    return {"weight_transfer_config": WeightTransferConfig(backend="file")}


def send(engine: Any, path: Path) -> None:
    """A whole update by vLLM's protocol."""
    engine.collective_rpc("init_weight_transfer_engine", args=({},))
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=({"path": str(path)},))
    engine.collective_rpc("finish_weight_update")
