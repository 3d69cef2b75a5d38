"""Where this process computes: its GPU, or the CPU with Megatron-core's calls redirected (cpu.py).

One process has one device. `prepare` comes before the first import of megatron.core, which megatron.py sees to.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_daro.actor import cpu


def prepare() -> None:
    """Make this process ready for the first import of megatron.core: without a GPU, its CUDA calls go to the CPU."""
    if current().type == "cuda":
        _have_transformer_engine_take_torchs_cudnn()
    else:
        cpu.install()


def current() -> torch.device:
    """Return the device of this process, the GPU of its LOCAL_RANK or the CPU, and make it this thread's device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@functools.cache
def _have_transformer_engine_take_torchs_cudnn() -> None:
    """Load the whole cuDNN that torch brought, before Transformer Engine is imported for the first time.

    Transformer Engine's library needs all parts of cuDNN by name, of which torch has loaded only the first. Where the
    system has a cuDNN too, the others would be the system's, and torch refuses to run with two versions (seen on an
    H200: 9.14 beside torch's 9.19). CUDNN_HOME, where Transformer Engine looks first, is set to torch's for the same
    reason.
    Source: transformer_engine 2.20.2, common/__init__.py, `_load_cuda_library_from_system`.
    """
    brings_its_own = any(need.startswith("nvidia-cudnn") for need in metadata.requires("torch") or ())
    if not brings_its_own or importlib.util.find_spec("transformer_engine") is None:
        return
    cudnn = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    for folder in (cudnn and cudnn.submodule_search_locations) or ():
        os.environ.setdefault("CUDNN_HOME", folder)
        for part in sorted(Path(folder).glob("lib/libcudnn*.so.*")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


def expand_segments(device: torch.device) -> None:
    """Use expandable segments for what is allocated on a GPU from now on, since lengths differ from batch to batch;
    change nothing if the environment configures the allocator.

    Not for memory that another process opens by CUDA IPC or that NCCL registers: such segments have handles of another
    kind, and pools for NCCL exclude them (pytorch/pytorch issues 130330, 165419).
    Source: torch 2.13, torch/cuda/memory.py, `_set_allocator_settings`.
    """
    named = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if device.type == "cuda" and not named:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


_PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_numa_node(device: torch.device) -> tuple[str, ...]:
    """Keep the threads of this process, and so the memory that they touch first, on the NUMA node of its GPU.

    Where the system names no node, for example because it has only one, nothing changes. Returns remarks for the user:
    why binding failed. torch's own entry point (torchrun --numa-binding) needs the program numactl, and takes an
    unnamed node for node 0.
    Source: torch 2.13, torch/numa/binding.py, AffinityMode.NODE. SGLang binds its servers' processes by itself.
    """
    if device.type != "cuda":
        return ()
    from torch.numa import binding

    gpu: Any = torch.cuda.get_device_properties(device)
    file = _PCI_DEVICES / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" / "numa_node"
    try:
        node = int(file.read_text(encoding="ascii"))
        cpus = binding._get_allowed_logical_cpu_indices_for_numa_node(numa_node_index=node) if node >= 0 else set()
    except (OSError, RuntimeError, ValueError) as error:
        return (f"a rank is not bound to the CPUs near its GPU, so copies to and from the host may be slower: {error}",)
    if node < 0:
        return ()
    if not cpus:
        return (f"a rank may use no CPU of NUMA node {node}, where its GPU is, so copies between them are slower",)
    binding._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=cpus)
    return ()


def shown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for readers: on a CPU, the same memory under a storage of its own.

    Making a numpy array of a tensor, as writers of files do, leaves its storage unable to be resized; but a trainer
    resizes storages to free their memory (actor/host_memory.py).
    """
    return tensor if tensor.device.type != "cpu" else torch.from_dlpack(tensor.detach())


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers can be used: it can be imported, and there is a GPU."""
    if not torch.cuda.is_available():
        return False
    _have_transformer_engine_take_torchs_cudnn()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True
