"""Handles of GPU memory (CUDA IPC), for servers of the same host.

Each rank of a server maps the memory and loads from it before it answers, so that the bucket may be freed then. Every
rank of every server gets handles of its own, since torch counts who still holds the memory, and they name the GPU by
UUID, since its number differs in a process that sees other GPUs. Host memory is rejected: it kills SGLang's server.
Source: sglang/srt/utils/common.py, MultiprocessingSerializer, and patch_torch.py.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import Calls, Post, SendFailure, SendPlan, SendReport
from megatron_daro.sync.relays import passed_on

# The device, of the arguments that rebuild a tensor from a handle. Source: torch/multiprocessing/reductions.py.
_DEVICE_ARGUMENT = 6


class HandleSender:
    """One rank's handles."""

    def __init__(self, calls: Calls) -> None:
        """Connect to nothing. Args: calls: to servers."""
        self._calls = calls

    def send(
        self,
        stream: Iterable[tuple[str, Tensor]],
        plan: SendPlan,
        *,
        label: str = "",
        group: dist.ProcessGroup | None = None,
    ) -> SendReport:
        """Hand the stream out; see `TransportSender`."""
        return push(stream, plan, self._calls, group)

    def close(self) -> None:
        """Nothing is kept."""


def push(
    stream: Iterable[tuple[str, Tensor]], plan: SendPlan, calls: Calls, group: dist.ProcessGroup | None = None
) -> SendReport:
    """Hand out the whole stream; read it to its end whatever happens.

    Args:
        stream: (HF name, tensor on a GPU); each item may be a collective of other ranks.
        plan: to which servers, in buckets of which size.
        calls: to servers. group: of this rank and those of other hosts that hand out the same buckets there.

    Returns:
        The report; failures by server.
    """
    # A storage that was handed out is counted by its receivers: a parameter's could not be freed after one was killed.
    buckets = bucketize(stream, plan.bucket_bytes, copy_all=True)
    return push_buckets(buckets if group is None else passed_on(buckets, group), plan, calls)


def push_buckets(buckets: Iterable[WeightBucket], plan: SendPlan, calls: Calls) -> SendReport:
    """Hand out buckets on a GPU that have memory of their own; read them to their end whatever happens.

    Args:
        buckets: asking for one may be a collective of other ranks. plan: to which servers. calls: to servers.

    Returns:
        The report; failures by server.
    """
    return asyncio.run(_push_all(buckets, plan, calls))


async def _push_all(buckets: Iterable[WeightBucket], plan: SendPlan, calls: Calls) -> SendReport:
    started, num_bytes, num_buckets = time.perf_counter(), 0, 0
    failures: dict[str, SendFailure] = {}
    async with calls() as post:
        for bucket in buckets:  # nothing else is on this event loop that would wait for the gathering
            if failures:
                continue  # other ranks gather along
            if not bucket.data.is_cuda:
                refusal = SendFailure("group", "engine.sglang.sync tensor needs weights on a GPU")
                failures = dict.fromkeys((target.name for target in plan.targets), refusal)
                continue
            failures = await _push_bucket(bucket, plan, post)
            num_bytes, num_buckets = num_bytes + bucket.data.nbytes, num_buckets + 1
    return SendReport(num_bytes, num_buckets, time.perf_counter() - started, failures=failures)


async def _push_bucket(bucket: WeightBucket, plan: SendPlan, post: Post) -> dict[str, SendFailure]:
    tensors = list(bucket.tensors())

    async def one(url: str, ranks: int) -> SendFailure | None:
        handles = [base64.b64encode(handles_of(tensors)).decode() for _ in range(ranks)]
        body = {"serialized_named_tensors": handles, "flush_cache": False}
        try:
            await post(url, "/update_weights_from_tensor", body, plan.timeout_s)
        except EngineError as error:
            return SendFailure("refused" if isinstance(error, RefusedError) else "unanswered", str(error))
        return None

    failures = await asyncio.gather(*(one(target.url, target.ranks) for target in plan.targets))
    return {target.name: failure for target, failure in zip(plan.targets, failures, strict=True) if failure}


def handles_of(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Return a pickle of (name, handle of the tensor's memory), for one receiver."""
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
