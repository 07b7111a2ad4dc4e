"""A CPU as verl's platform: the device calls that verl makes, which torch.cpu lacks, do nothing.

verl imports it by VERL_USE_EXTERNAL_MODULES, in every process.
"""

from __future__ import annotations

import os
import types
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

GIB = 1 << 30


class CPUDevice(types.ModuleType):
    """``torch.cpu``, with what verl calls of ``torch.cuda``."""

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return 8 * GIB, 16 * GIB

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "cpu"

    def __getattr__(self, name: str) -> Any:
        if "memory" in name:
            return lambda *_, **__: 0
        if name in ("empty_cache", "ipc_collect", "synchronize", "set_device", "manual_seed"):
            return lambda *_, **__: None
        if name.startswith(("manual_seed", "reset_")):
            return lambda *_, **__: None
        return getattr(torch.cpu, name)


@platform_manager.PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """Ray's "GPU" is a number that the test hands to ``ray.init``; weights go by shared memory."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CPUDevice("cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None:
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def one_backend(init: Any) -> Any:
    """verl asks for one backend a device, and both are gloo here."""

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str) and backend.startswith("cpu:gloo,cpu:"):
            backend = "gloo"
        return init(backend, *args, **kwargs)

    return init_process_group


platform_manager.set_platform(PlatformCPU())
dist.init_process_group = one_backend(dist.init_process_group)
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # the key of verl's own engines
