"""Process groups and seeds of one training process.

A worker initializes these first; everything else in actor/ asks Megatron's parallel state. Rejects a world that is
not TP x PP x CP x DP, and expert-parallel sizes that do not fit into it.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_daro.actor import device
from megatron_daro.actor.megatron import parallel_state, tensor_parallel
from megatron_daro.config import nccl_environment
from megatron_daro.config.actor import resolved_expert_tensor
from megatron_daro.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel dimensions, in processes.

    expert: ranks that share the experts of a layer (EP). expert_tensor: ranks that share each expert (ETP); None: 1
    with EP > 1, else the same as tensor. Experts use the processes of TP, CP and DP, in groups of ETP x EP.
    virtual_pipeline: parts of the model on each pipeline stage (VPP); part v of stage p is number v * PP + p of all.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual_pipeline: int = 1

    @property
    def expert_group_size(self) -> int:
        """Processes that hold all experts of a layer between them: ETP x EP."""
        return self.expert * self.expert_tensor_size

    @property
    def expert_tensor_size(self) -> int:
        """expert_tensor with its default resolved."""
        return resolved_expert_tensor(self.expert_tensor, self.tensor, self.expert)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.context * self.data


def configure_process(*, expandable_segments: bool) -> tuple[str, ...]:
    """Configure how a rank that has its process to itself allocates memory, and bind it to the CPUs near its GPU; call
    before its first process group. Returns remarks for the user."""
    target = device.current()
    if expandable_segments:
        device.expand_segments(target)
    return device.bind_to_numa_node(target)


def initialize(layout: Layout, *, rank: int = 0, init_method: str | None = None, seed: int, timeout_s: float) -> None:
    """Join the process group and build Megatron's groups. Collectives that wait longer than `timeout_s` fail.

    Args:
        layout: sizes; their product is the world size.
        rank: this process, 0..world_size-1 (TP fastest, then CP, DP, PP: Megatron's order "tp-cp-ep-dp-pp").
        init_method: a torch rendezvous address such as "tcp://127.0.0.1:29500"; None: a world of this process alone.
        seed: base seed; Megatron offsets it per TP and PP rank.
        timeout_s: limit of every collective, in seconds.
    """
    os.environ.update(nccl_environment.nccl_of_rank(os.environ))
    target = device.current()
    backend = "nccl" if target.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=init_method,
        store=dist.HashStore() if init_method is None else None,
        rank=rank,
        world_size=1 if init_method is None else layout.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    build_groups(layout, seed=seed)


def build_groups(layout: Layout, *, seed: int) -> None:
    """Build Megatron's groups on top of an existing torch process group (tests and checks of layouts bring their own).

    Raises:
        ConfigError: the layout does not fit the number of processes, or its sizes do not fit each other.
    """
    if dist.get_world_size() != layout.world_size:
        raise ConfigError(
            f"actor layout: TP {layout.tensor} x PP {layout.pipeline} x CP {layout.context} x DP {layout.data} = "
            f"{layout.world_size} processes, but {dist.get_world_size()} were started; change actor.*_parallel"
        )
    stage = layout.world_size // layout.pipeline
    if stage % layout.expert_group_size:
        raise ConfigError(
            f"actor layout: expert groups of ETP x EP = {layout.expert_group_size} processes do not divide the {stage} "
            "processes of a pipeline stage (TP x CP x DP); change actor.expert_parallel or actor.data_parallel"
        )
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        raise ConfigError(
            f"actor layout: {layout.virtual_pipeline} virtual stages on a pipeline of one stage; change "
            "actor.virtual_pipeline_parallel or actor.pipeline_parallel"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        create_gloo_process_groups=False,  # nothing here uses them, and each rank's host name would have to resolve
    )
    seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Seed torch and Megatron's tensor-parallel generators, the same way on every data-parallel rank."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave all groups; afterwards `initialize` may be called again in this process."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    while _shut_connections:
        _shut_connections.pop().close()


_shut_connections: list[socket.socket] = []
"""Connections that `abort` shut for reading; they are kept open until `shutdown`."""

Address = tuple[str, int]
"""An IP address and a TCP port."""


def listening() -> frozenset[Address]:
    """Return the addresses at which this process listens. Those that a new group adds are where its peers connect."""
    return frozenset((c.laddr.ip, c.laddr.port) for c in _tcp_connections() if c.status == psutil.CONN_LISTEN)


def gathered_addresses(own: Collection[Address]) -> frozenset[Address]:
    """Gather the addresses of all ranks. Collective over the world."""
    of_ranks: list[list[Address]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, sorted(own))
    return frozenset(address for addresses in of_ranks for address in addresses)


def abort(own: Collection[Address], all_ranks: Collection[Address]) -> None:
    """Make every collective call that waits in this process fail; every living rank calls this. Call it from another
    thread than the waiting one, which then calls `shutdown`.

    NCCL's communicators are aborted. torch 2.13 cannot abort gloo (ProcessGroupGloo.hpp has no `abort`, Backend's is
    empty), but each gloo group listens on a port of its own for as long as it lives: each rank shuts its connections at
    such ports for reading, whether it accepted or made them, and gloo raises "Connection closed by peer". So no rank
    depends on a peer that is frozen, or whose node is, and that will never call this or close anything.

    The connections stay open for writing, here and at the peers: a send that failed before gloo had noticed the end of
    reading would never return (gloo, transport/tcp/pair.cc: `signalException` does not look at `tx_`). A send that a
    frozen peer has received only in part never returns either; Healing gives up a rank that does not leave.

    Args:
        own: addresses that `listening` returned for the groups of this rank. all_ranks: the same of every rank.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        c10d._abort_process_group()
    ports = {port for _, port in own}
    for connection in _tcp_connections():
        to_a_peer = bool(connection.raddr) and (connection.raddr.ip, connection.raddr.port) in all_ranks
        if connection.status != psutil.CONN_LISTEN and (to_a_peer or connection.laddr.port in ports):
            _shut(connection.fd, connection.laddr.port)


def _shut(descriptor: int, port: int) -> None:
    """Shut a connection for reading and keep it open, if the descriptor still belongs to one at this local port."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
        if connection.getsockname()[1] == port:
            _shut_connections.append(connection)
            connection.shutdown(socket.SHUT_RD)
    except OSError:  # closed meanwhile: nothing waits on it any more
        return


def _tcp_connections() -> list[Any]:
    return [c for c in psutil.Process().net_connections("tcp") if c.laddr]


def data_parallel_rank() -> int:
    """Return which data-parallel replica this rank belongs to."""
    return parallel_state.get_data_parallel_rank()


def pipeline_parallel_rank() -> int:
    """Return this process's pipeline stage."""
    return parallel_state.get_pipeline_model_parallel_rank()


def weights_key() -> tuple[int, ...]:
    """Return a key that is equal on ranks with the same weights: their ranks in the pipeline, tensor, expert and
    expert-tensor groups. Such ranks differ only in their part of the optimizer."""
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


def reports_for_shard() -> bool:
    """Whether this rank reports for its data-parallel rank: last stage, tensor and context rank 0."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first and parallel_state.is_pipeline_last_stage()
