"""The sending end of a weight update on a rank: its exported tensors go on the plan's way to the receivers.

    exported stream -> digests taken -> fp8 blocks, where the plan asks for them -> the sender of plan.transport

The ways are in transports.py. Every sender reads the stream to its end whatever happens, since other ranks gather
along. From shards to shards each rank sends by itself (shard_tcp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from megatron_daro.sync.digests import noted
from megatron_daro.sync.fp8_cast import as_blocks
from megatron_daro.sync.plan import Calls, Digest, SendPlan, SendReport
from megatron_daro.sync.transports import RankEnd, TransportSender, transport_of

Stream = Iterable[tuple[str, Tensor]]


class Sender:
    """One rank's end. `close` it, or its threads and sockets stay."""

    def __init__(
        self, host: str, backend: str, calls: Calls, hand_over: Callable[[Stream, SendPlan], SendReport] | None = None
    ) -> None:
        """Connect to nothing.

        Args:
            host: address of this rank as servers reach it. backend: of broadcasts, "gloo" or "nccl".
            calls: to servers. hand_over: gives buckets to actors.
        """
        self._rank = RankEnd(host, backend, calls, hand_over)
        self._senders: dict[str, TransportSender] = {}

    def send(self, stream: Stream, plan: SendPlan, *, label: str, group: dist.ProcessGroup | None = None) -> SendReport:
        """Send the whole stream; arguments and what is returned as of `TransportSender.send`."""
        digests: dict[str, Digest] = {}
        if plan.digest_dtype:
            stream = noted(stream, plan.digest_dtype, digests)
        blocks: list[str] = []
        if plan.fp8_blocks:
            stream = as_blocks(stream, plan.fp8_blocks, plan.bucket_bytes, blocks)
        report = self._sender(plan.transport).send(stream, plan, label=label, group=group)
        return replace(report, digests=digests, fp8_blocks=tuple(blocks))

    def close(self) -> None:
        """Leave the group of a broadcast; the next one makes another. May be called twice."""
        for sender in self._senders.values():
            sender.close()

    def _sender(self, transport: str) -> TransportSender:
        """Keep each sender: the next update finds the group of a broadcast as it is."""
        if transport not in self._senders:
            make = transport_of(transport).sender
            assert make is not None, f"no single rank sends all on the way {transport!r}"
            self._senders[transport] = make(self._rank)
        return self._senders[transport]
