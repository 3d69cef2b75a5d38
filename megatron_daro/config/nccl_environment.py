"""NCCL's and torch's variables of the processes that weights are sent between.

Each process reads them once: a rank sets its own before anything calls CUDA, a server has them from its start, and what
both ends of a communicator must agree on is here once.
"""

from __future__ import annotations

from collections.abc import Mapping

_BOTH_ENDS = {
    # How a GPU's memory is handed to another process of its node: by cuMem handles (1) or CUDA IPC (0). NCCL takes 1
    # by itself, and SGLang 0.5.23 sets 0 where it finds nothing (srt/entrypoints/engine.py, _set_envs_and_config): then
    # one end exports a handle that the other cannot open (NCCL 2.30, transport/p2p.cc), and the first broadcast between
    # a rank and a server of one node fails.
    "NCCL_CUMEM_ENABLE": "0",
    # A watchdog of torch that sees an error of NCCL asks all groups for a dump; the default group's monitor then waits
    # for it and ends the process 480 s later, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says
    # (torch 2.13, ProcessGroupNCCL.cpp, broadcastDumpSignal and HeartbeatMonitor::runLoop). A broken broadcast is no
    # reason to end a rank or a server.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_SERVER = {
    # What a server's watchdog does when a peer of a broadcast is gone. By default (3) it ends the process, so that one
    # death would take all servers with it. At 2 it aborts the communicator: what the GPU waits for ends, and the server
    # can take part in the next group. At 0 it would wait on, until it is started again (torch 2.13,
    # ProcessGroupNCCL.hpp, ErrorHandlingMode). Whatever the broken broadcast left is sent anew before a request.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
}
_RANK = {
    # Megatron overlaps communication of tensor and context parallelism by the order of kernels in one queue
    # (megatron/core/tensor_parallel/layers.py asks for it). The driver reads it when a process makes its context, which
    # the import of actor/ does.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
# NCCL gives memory back that it allocated with cuMem only; such a rank is in no group with a server.
_SHARING_RANK = {"NCCL_CUMEM_ENABLE": "1"}


def nccl_of_both_ends(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank and a server have alike."""
    return _with_defaults(_BOTH_ENDS, inherited)


def nccl_of_server(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a server must have."""
    return _with_defaults(_BOTH_ENDS | _SERVER, inherited)


def nccl_of_rank(inherited: Mapping[str, str], *, shares_gpu: bool = False) -> dict[str, str]:
    """Return what a rank of the actor must have before its first call of CUDA. Args: shares_gpu: with a server."""
    return _with_defaults(_BOTH_ENDS | _RANK | (_SHARING_RANK if shares_gpu else {}), inherited)


def _with_defaults(values: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    return {name: inherited.get(name, value) for name, value in values.items()}
