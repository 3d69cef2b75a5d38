"""The GPU memory of NCCL's communicators, which a rank gives back while servers have its GPU.

Each communicator keeps buffers for each of its peers: with several parallel dimensions several GB a rank. Suspended, it
keeps its addresses and connections, but cannot be used; what NCCL allocated with cuMem is freed (NCCL_CUMEM_ENABLE).
Source: NCCL 2.30.7, src/mem_manager.cc, `ncclCommMemSuspend`; torch 2.13, ProcessGroupNCCL.hpp, `suspend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from megatron_daro.actor.megatron import parallel_state

_FIRST_NCCL = (2, 29, 7)


def suspend() -> int:
    """Free the memory of communicators until `resume`, where NCCL can. Collective over all ranks.

    Returns:
        Bytes that the communicators still hold.
    """
    backends = list(_suspendable())
    for backend in backends:
        backend.suspend()
    return sum(backend.memory_stats()["persist"] for backend in backends)


def resume() -> None:
    """Allocate the memory again. Collective over all ranks."""
    for backend in _suspendable():
        backend.resume()


def _suspendable() -> Iterator[Any]:
    """Yield the backends of this rank's groups that have communicators, in the order in which all ranks made the
    groups: suspending one waits for all of its ranks, so ranks in different orders would wait for each other.

    The pipeline group of virtual stages is left out: torch makes a communicator for each pair of its ranks, in an order
    of its own.
    """
    if not torch.cuda.is_available() or torch.cuda.nccl.version() < _FIRST_NCCL:
        return
    in_pairs = None
    if parallel_state.get_virtual_pipeline_model_parallel_world_size():
        in_pairs = parallel_state.get_pipeline_model_parallel_group()
    for group in c10d._world.pg_map:
        backend: Any = group._get_backend(torch.device("cuda"))
        if group is not in_pairs and backend.name() == "nccl" and backend._is_initialized():
            yield backend
