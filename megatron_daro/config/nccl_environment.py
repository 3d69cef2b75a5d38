"""Environment variables of NCCL and torch for the processes between which weights are sent.

Each process reads them once: a rank sets its own before anything calls CUDA, and a server is started with them. The
variables on which both ends of a communicator must agree are defined here once.
"""

from __future__ import annotations

from collections.abc import Mapping

_BOTH_ENDS = {
    # How a GPU's memory is passed to another process of its node: by cuMem handles (1) or CUDA IPC (0). NCCL's default
    # is 1, and SGLang 0.5.23 sets 0 if the variable is unset (srt/entrypoints/engine.py, _set_envs_and_config): then
    # one end exports a handle that the other cannot open (NCCL 2.30, transport/p2p.cc), and the first broadcast between
    # a rank and a server of one node fails.
    "NCCL_CUMEM_ENABLE": "0",
    # When torch's watchdog sees an NCCL error, it asks all groups for a dump; the default group's monitor then waits
    # for the dump and ends the process 480 s later, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says
    # (torch 2.13, ProcessGroupNCCL.cpp, broadcastDumpSignal and HeartbeatMonitor::runLoop). A broken broadcast must not
    # end a rank or a server.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_SERVER = {
    # What a server's watchdog does when a peer of a broadcast is gone. By default (3) it ends the process, so one death
    # would end all servers. With 2 it aborts the communicator: the GPU stops waiting, and the server can join the next
    # group. With 0 the server would wait until it is restarted (torch 2.13, ProcessGroupNCCL.hpp, ErrorHandlingMode).
    # Weights that the broken broadcast may have left incomplete are sent again before the server gets a request.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
}
_RANK = {
    # Megatron overlaps the communication of tensor and context parallelism by the order of kernels in one queue
    # (megatron/core/tensor_parallel/layers.py requires this). The CUDA driver reads the variable when a process creates
    # its context, which the import of actor/ does.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
# NCCL can release only memory that it allocated with cuMem; a rank that shares its GPU is in no group with a server.
_SHARING_RANK = {"NCCL_CUMEM_ENABLE": "1"}


def nccl_of_both_ends(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be the same for a rank and a server; inherited values are kept."""
    return _with_defaults(_BOTH_ENDS, inherited)


def nccl_of_server(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a server must have; inherited values are kept."""
    return _with_defaults(_BOTH_ENDS | _SERVER, inherited)


def nccl_of_rank(inherited: Mapping[str, str], *, shares_gpu: bool = False) -> dict[str, str]:
    """Return the variables that a rank of the actor must have before its first CUDA call; inherited values are kept.
    Args: shares_gpu: whether it shares its GPU with a server."""
    return _with_defaults(_BOTH_ENDS | _RANK | (_SHARING_RANK if shares_gpu else {}), inherited)


def _with_defaults(values: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    return {name: inherited.get(name, value) for name, value in values.items()}
