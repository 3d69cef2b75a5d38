"""What an exporting rank does with its weights: one stream of tensors, by whatever transport the plan names.

Place in the data flow: a rank's export -> Sender -> servers, files, or actors. It takes the digests of some tensors on
the way, reads every stream to its end (other ranks gather along), and keeps the group of a broadcast for the next time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_daro.sync.broadcast import BroadcastSender
from megatron_daro.sync.buckets import tensor_bytes
from megatron_daro.sync.disk import write_shards
from megatron_daro.sync.fp8_blocks import as_blocks
from megatron_daro.sync.plan import Digest, Post, SendPlan, SendReport, is_hashed
from megatron_daro.sync.tensor import push

Stream = Iterable[tuple[str, Tensor]]
HandOver = Callable[[Stream, SendPlan], SendReport]


class Sender:
    """One rank's end. `close` it, or its threads and sockets stay."""

    def __init__(self, host: str, backend: str, post: Post, hand_over: HandOver | None = None) -> None:
        """Connect to nothing.

        Args:
            host: address of this rank as servers reach it. backend: of broadcasts, "gloo" or "nccl".
            post: calls a server. hand_over: gives buckets to actors.
        """
        self._broadcast = BroadcastSender(host, backend, post)
        self._post, self._hand_over = post, hand_over

    def send(self, stream: Stream, plan: SendPlan, *, label: str) -> SendReport:
        """Send the whole stream; read it to its end whatever happens.

        Args:
            stream: (HF name, tensor); each item may be a collective of other ranks.
            plan: what is to be sent how. label: of this rank, in the names of files.

        Returns:
            The report. Raises SyncError where files cannot be written.
        """
        digests: dict[str, Digest] = {}
        if plan.digest_dtype:
            stream = noted(stream, plan.digest_dtype, digests)
        blocks: list[str] = []
        if plan.fp8_blocks:
            stream = as_blocks(stream, plan.fp8_blocks, plan.bucket_bytes, blocks)
        return replace(self._sent(stream, plan, label), digests=digests, fp8_blocks=tuple(blocks))

    def close(self) -> None:
        """Leaves the group of broadcasts. May be called twice."""
        self._broadcast.close()

    def _sent(self, stream: Stream, plan: SendPlan, label: str) -> SendReport:
        if plan.transport == "distributed":
            return self._broadcast.send(stream, plan)
        if plan.transport == "tensor":
            return push(stream, plan, self._post)
        if plan.transport == "actor":
            assert self._hand_over is not None, "this process has no actors to hand buckets to"
            return self._hand_over(stream, plan)
        return write_shards(plan, label, stream)


def noted(stream: Stream, received_dtype: str, digests: dict[str, Digest]) -> Iterator[tuple[str, Tensor]]:
    """Pass the stream through and take the digests of some tensors, as servers compute them on a CPU."""
    dtype = getattr(torch, received_dtype, None)
    for name, tensor in stream:
        if is_hashed(name):
            sent = _sha(tensor)
            cast = isinstance(dtype, torch.dtype) and dtype != tensor.dtype
            received = _sha(tensor.to(dtype)) if cast else sent
            digests[name] = Digest(str(tensor.dtype).removeprefix("torch."), sent, received)
        yield name, tensor


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor).cpu().numpy().data).hexdigest()[:16]
