"""Weights to servers of the same host as handles of GPU memory (CUDA IPC): nothing is copied between processes.

Place in the data flow: an exporting rank packs buckets on its GPU and posts their handles; each rank of a server maps
the memory and loads from it before it answers, so the bucket may be freed then. Every rank of every server gets handles
of its own: torch counts for each one who still holds the memory. They name the GPU by its UUID, since its number is
another one in a process that sees other GPUs. Refuses host memory: there SGLang's server dies of a sharing strategy
that it does not know.
Source: sglang/srt/utils/common.py, MultiprocessingSerializer: base64 of torch.multiprocessing's ForkingPickler;
sglang/srt/utils/patch_torch.py: what a server makes of a UUID.
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
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import Post, SendFailure, SendPlan, SendReport

# The device, of the arguments that rebuild a tensor from a handle. Source: torch/multiprocessing/reductions.py.
_DEVICE_ARGUMENT = 6


def push(stream: Iterable[tuple[str, Tensor]], plan: SendPlan, post: Post) -> SendReport:
    """Hands out the whole stream; reads it to its end whatever happens.

    Args:
        stream: (HF name, tensor on a GPU); each item may be a collective of other ranks.
        plan: to which servers, in buckets of which size.
        post: calls a server.

    Returns:
        The report; failures by server.
    """
    started, num_bytes, num_buckets = time.perf_counter(), 0, 0
    failures: dict[str, SendFailure] = {}
    for bucket in bucketize(stream, plan.bucket_bytes):
        if failures:
            continue  # other ranks gather along
        if not bucket.data.is_cuda:
            refusal = SendFailure("group", "engine.sglang.sync tensor needs weights on a GPU")
            failures = dict.fromkeys((target.name for target in plan.targets), refusal)
            continue
        failures = asyncio.run(_push_bucket(bucket, plan, post))
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

    said = await asyncio.gather(*(one(target.url, target.ranks) for target in plan.targets))
    return {target.name: failure for target, failure in zip(plan.targets, said, strict=True) if failure}


def handles_of(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Return a pickle of (name, handle of the tensor's memory), for one receiver."""
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(tensors)
    return buffer.getvalue()


class _HandlePickler(ForkingPickler):
    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        reduced: tuple[Callable[..., Tensor], tuple[Any, ...]] = reductions.reduce_tensor(value)
        rebuild, arguments = reduced
        if rebuild is not reductions.rebuild_cuda_tensor:
            return reduced
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
