"""verl on a machine without a GPU: a platform for its own registry, so that its engines run on the CPU over gloo.

Loaded with VERL_PLATFORM=cpu and VERL_USE_EXTERNAL_MODULES=verl_cpu_platform. verl 0.9.1 brings platforms for GPUs and
NPUs only. `enable_engines` registers the FSDP engine for the device "cpu", which verl itself does not.
"""

from __future__ import annotations

import contextlib
import os
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuModule(ModuleType):
    """torch.cpu, and no memory to report."""

    def __getattr__(self, name: str) -> Any:
        if name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            return lambda *args, **kwargs: 0
        if name == "mem_get_info":
            return lambda *args, **kwargs: (0, 0)
        if name in ("empty_cache", "ipc_collect", "set_device", "synchronize"):
            return lambda *args, **kwargs: None
        if name == "get_device_name":
            return lambda *args, **kwargs: "CPU"
        if name in ("get_rng_state", "set_rng_state", "manual_seed"):
            return getattr(torch, name)
        return getattr(torch.cpu, name)


_MODULE = _CpuModule("torch.cpu")
_NONE = lambda self, *args, **kwargs: None


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """What verl asks a device for."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _MODULE)
    is_available = lambda self: True
    current_device = lambda self: torch.device("cpu")
    device_count = lambda self: 1
    set_device = synchronize = manual_seed_all = set_allocator_settings = empty_cache = _NONE
    profiler_start = profiler_stop = cudart = _NONE
    manual_seed = lambda self, seed: torch.manual_seed(seed)
    get_device_capability = lambda self, index=0: (None, None)
    communication_backend_name = lambda self: "gloo"
    visible_devices_envvar = lambda self: "CUDA_VISIBLE_DEVICES"
    nvtx_range = lambda self, message: contextlib.nullcontext()
    ray_resource_name = lambda self: "CPU"
    ray_noset_envvars = lambda self: []
    is_ipc_supported = lambda self: False


def enable_engines() -> None:
    """Let EngineRegistry hand out the FSDP engine for this device; after verl.workers was imported."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


os.environ.setdefault("VERL_PLATFORM", "cpu")
