"""The sending end of a weight update on a rank: its exported tensors go to the receivers by the plan's transport.

    exported stream -> digests taken -> fp8 blocks, if the plan asks for them -> the sender of plan.transport

Properties of each transport: config/transports.py. Not sent here: from shards to shards, shard_sender.py; files,
files.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_daro.sync.adapters import AdapterSender
from megatron_daro.sync.broadcast import BroadcastSender
from megatron_daro.sync.digests import noted
from megatron_daro.sync.fp8_cast import as_blocks
from megatron_daro.sync.handles import HandleSender
from megatron_daro.sync.plan import Connect, Digest, SendPlan, SendReport
from megatron_daro.sync.transport_sender import TransportSender

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_daro.sync.transport_sender import Stream


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What a sender needs to know of its rank. host: address as servers reach it. backend: of broadcasts, "gloo" or
    "nccl". connect: to servers. to_embedded: sends to embedded engines; None in a process without Ray."""

    host: str
    backend: str
    connect: Connect
    to_embedded: TransportSender | None = None


def _to_embedded(rank: RankEnd) -> TransportSender:
    assert rank.to_embedded is not None, "this process has no embedded engines to send buckets to"
    return rank.to_embedded


SENDERS: Mapping[str, Callable[[RankEnd], TransportSender]] = {
    "distributed": lambda rank: BroadcastSender(rank.host, rank.backend, rank.connect),
    "tensor": lambda rank: HandleSender(rank.connect),
    "adapters": lambda rank: AdapterSender(rank.connect),
    "ray": _to_embedded,
}
"""Name of the transport -> what makes a rank's sending end."""


class Senders:
    """Sends a rank's Hugging Face tensors, with one sender for each transport that plans name. `close` it, or threads
    and sockets stay."""

    def __init__(self, host: str, backend: str, connect: Connect, to_embedded: TransportSender | None = None) -> None:
        """Connect to nothing. Args: see `RankEnd`."""
        self._rank = RankEnd(host, backend, connect, to_embedded)
        self._senders: dict[str, TransportSender] = {}

    def send(self, stream: Stream, plan: SendPlan, *, group: ProcessGroup | None = None) -> SendReport:
        """Send the whole stream; arguments and result as in `TransportSender.send`."""
        digests: dict[str, Digest] = {}
        if plan.digest_dtype:
            stream = noted(stream, plan.digest_dtype, digests)
        blocks: list[str] = []
        if plan.fp8_blocks:
            stream = as_blocks(stream, plan.fp8_blocks, plan.bucket_bytes, blocks)
        if plan.transport not in self._senders:  # kept, so that the next update can use the same broadcast group
            self._senders[plan.transport] = SENDERS[plan.transport](self._rank)
        report = self._senders[plan.transport].send(stream, plan, group=group)
        return replace(report, digests=digests, fp8_blocks=tuple(blocks))

    def close(self) -> None:
        """Close all senders; a broadcast group is left, and the next send makes another. May be called twice."""
        for sender in self._senders.values():
            sender.close()
