"""Where this process computes: its GPU, or the CPU with Megatron-core's CUDA calls redirected.

Every module of actor/ that imports megatron.core imports this one first. Refuses to guess: one process, one device.
"""

from __future__ import annotations

import os
import warnings

import torch


def prepare() -> torch.device:
    """Return the device of this process; on a machine without a GPU the redirection of actor/cpu.py is installed."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    from megatron_daro.actor import cpu

    cpu.install()
    return torch.device("cpu")


def shown(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for readers: on a CPU, the same memory under a storage of its own.

    Whoever makes a numpy array of a tensor, as writers of files do, makes its storage one that cannot be resized any
    more; those of a trainer are, to give their memory away (actor/host_memory.py).
    """
    return tensor if tensor.device.type != "cpu" else torch.from_dlpack(tensor.detach())


def has_transformer_engine() -> bool:
    """Whether Transformer Engine layers can be used: installed, and a GPU is there."""
    if not torch.cuda.is_available():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True
