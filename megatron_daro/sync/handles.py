"""Handles of GPU memory (CUDA IPC), for servers on the same host.

Each rank of a server maps the memory and loads from it before it answers, so a bucket may be freed after the answer.
Every rank of every server gets its own handles, since torch counts the holders of the memory; they name the GPU by
UUID, since its number differs in a process that sees other GPUs. Host memory is rejected, since it would kill SGLang's
server. For servers on other hosts, a rank there hands the buckets out (routes.py), if necessary one that receives them
by broadcast.
Source: sglang/srt/utils/common.py, MultiprocessingSerializer, and patch_torch.py.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_daro.errors import SyncError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import Connect, Post, SendFailure, SendPlan, SendReport
from megatron_daro.sync.transport_sender import TransportSender, posted_to_all, read_to_its_end

# Position of the device among the arguments that rebuild a tensor from a handle. Source:
# torch/multiprocessing/reductions.py.
_DEVICE_ARGUMENT = 6


class HandleSender(TransportSender):
    """The sending end on one rank."""

    def __init__(self, connect: Connect) -> None:
        """Connect to nothing. Args: connect: to servers."""
        self._connect = connect

    def _send(
        self, tensors: Iterator[tuple[str, Tensor]], plan: SendPlan, group: dist.ProcessGroup | None
    ) -> SendReport:
        # Copies only, since torch counts the receivers of a storage: a parameter's storage could never be freed after a
        # receiver was killed.
        buckets = bucketize(tensors, plan.bucket_bytes, copy_all=True)
        return push_buckets(buckets if group is None else passed_on(buckets, group), plan, self._connect)


def push_buckets(buckets: Iterable[WeightBucket], plan: SendPlan, connect: Connect) -> SendReport:
    """Hand out buckets, each in GPU memory of its own, until a server fails; read the others to the end."""
    with read_to_its_end(buckets) as rest:  # `passed_on` also broadcasts them to ranks on other hosts
        return asyncio.run(_push_all(rest, plan, connect))


def passed_on(buckets: Iterable[WeightBucket], group: dist.ProcessGroup) -> Iterator[WeightBucket]:
    """Broadcast each bucket from this rank, the first of the group, then yield it; announce the end."""
    try:
        for bucket in buckets:
            _announce((bucket.names, bucket.shapes, bucket.dtype, bucket.data.nbytes), group)
            dist.broadcast(bucket.data, dist.get_global_rank(group, 0), group=group)
            yield bucket
    finally:
        _announce(None, group)


def received(group: dist.ProcessGroup, device: torch.device) -> Iterator[WeightBucket]:
    """Yield the buckets that the first rank of the group broadcasts, each in memory of its own, until it announces the
    end."""
    while (header := _announce(None, group)) is not None:
        names, shapes, dtype, num_bytes = header
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
        yield WeightBucket(names, shapes, dtype, data)


_Header = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], str, int]


def _announce(header: _Header | None, group: dist.ProcessGroup) -> _Header | None:
    """Broadcast the first rank's header; return it on all ranks. None: no bucket follows. Other ranks' arguments are
    ignored."""
    header_of_rank: list[_Header | None] = [header]
    dist.broadcast_object_list(header_of_rank, dist.get_global_rank(group, 0), group=group)
    return header_of_rank[0]


def groups_of(members: Sequence[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make torch groups of these ranks, and return those that this rank is in. Collective over all ranks of the policy,
    with the same argument on each."""
    groups = {tuple(ranks): dist.new_group(list(ranks)) for ranks in members}
    mine = dist.get_rank()
    return {ranks: group for ranks, group in groups.items() if mine in ranks}


async def _push_all(buckets: Iterable[WeightBucket], plan: SendPlan, connect: Connect) -> SendReport:
    started, num_bytes = time.perf_counter(), 0
    failures: dict[str, SendFailure] = {}
    async with connect() as post:
        for bucket in buckets:  # blocks the event loop while gathering, but nothing else runs on it
            if not bucket.data.is_cuda:
                where = bucket.data.device
                raise SyncError(f"engine.sglang.sync tensor needs weights on a GPU, got {where}: set distributed")
            failures = await _push_bucket(bucket, plan, post)
            num_bytes += bucket.data.nbytes
            if failures:
                break
    return SendReport(num_bytes, time.perf_counter() - started, failures=failures)


async def _push_bucket(bucket: WeightBucket, plan: SendPlan, post: Post) -> dict[str, SendFailure]:
    tensors = list(bucket.tensors())

    def body(ranks: int) -> dict[str, Any]:
        handles = [base64.b64encode(handles_of(tensors)).decode() for _ in range(ranks)]
        return {"serialized_named_tensors": handles, "flush_cache": False}

    return await posted_to_all(plan, post, "/update_weights_from_tensor", body)


def handles_of(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Return a pickle of [(name, handle of the tensor's memory)], for one receiver."""
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(tensors)
    return buffer.getvalue()


class _HandlePickler(ForkingPickler):
    def reducer_override(self, value: object) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if not isinstance(value, Tensor):
            return NotImplemented
        reduced: tuple[Callable[..., Tensor], tuple[Any, ...]] = reductions.reduce_tensor(value)
        rebuild, arguments = reduced
        if rebuild is not reductions.rebuild_cuda_tensor:
            return reduced
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
