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
}
_RANK = {
    # A watchdog of torch that sees an error of NCCL asks all groups for a dump; the default group's monitor then waits
    # for it and ends the process 480 s later, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says
    # (torch 2.13, ProcessGroupNCCL.cpp, broadcastDumpSignal and HeartbeatMonitor::runLoop). A broken broadcast to a
    # server is no reason to end a rank.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Megatron overlaps communication of tensor and context parallelism by the order of kernels in one queue
    # (megatron/core/tensor_parallel/layers.py asks for it). The driver reads it when a process makes its context, which
    # the import of actor/ does.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def nccl_of_both_ends(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank and a server of the same node must have alike."""
    return {name: inherited.get(name, value) for name, value in _BOTH_ENDS.items()}


def nccl_of_rank(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank of the actor must have before its first call of CUDA."""
    return nccl_of_both_ends(inherited) | {name: inherited.get(name, value) for name, value in _RANK.items()}
