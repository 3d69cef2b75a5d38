"""The ways on which weights go from the policy's ranks to receivers: one row each.

Whatever depends on the way asks its row: the ranks for their sender, the engine for the steps of an update, the start
of a server for its loader, its vetting for the calls that it must have. Beside a row here, another way needs its sender
(a file of this folder), its name with a sentence for users at `engine.sglang.sync` (config/sections.py, from which
docs/configuration.md is made), what it does not go with (config/rules/engine.py), and a loader in in_server/ where
SGLang cannot load what arrives by itself. Imports no torch before a sender is made: the driver asks, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_daro.errors import SyncError
from megatron_daro.sync.in_server import LOADER
from megatron_daro.sync.plan import Calls, SendPlan, SendReport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    Stream = Iterable[tuple[str, Tensor]]


class TransportSender(Protocol):
    """The sending end of one way on one rank."""

    def send(self, stream: Stream, plan: SendPlan, *, label: str = "", group: ProcessGroup | None = None) -> SendReport:
        """Send the whole stream; read it to its end whatever happens.

        Args:
            stream: (HF name, tensor); each item may be a collective of other ranks.
            plan: what is to be sent to whom.
            label: of this rank, in the names of files.
            group: of this rank and those of other hosts that hand out the same buckets there.

        Returns:
            The report; failures by receiver. Raises SyncError where files cannot be written.
        """
        ...

    def close(self) -> None:
        """Let go of threads and sockets. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What a sender has of its rank. host: address as servers reach it. backend: of broadcasts, "gloo" or "nccl".
    calls: to servers. hand_over: gives the buckets of a stream to actors."""

    host: str
    backend: str
    calls: Calls
    hand_over: Callable[[Stream, SendPlan], SendReport] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One way.

    sender: makes a rank's end; None: every rank sends its own at once (`rank_to_rank`).
    calls: that a server must have for it, beside those that every run needs.
    only_sglang: the one version whose parameters are known; empty: any that has the calls.
    loader: that servers are started with, to load what SGLang cannot load itself.
    collective: both ends are ranks of one group, so they need one NCCL, and where sending broke a server may still
        wait for the group on its GPUs.
    rank_to_rank: each rank of the policy sends what it holds to those ranks of servers that need it.
    maps_memory: handles of GPU memory are handed over, inside a host, to servers that see the GPUs of its ranks.
    files: servers read an HF checkpoint when all of it is there; no update is open on them meanwhile.
    """

    sender: Callable[[RankEnd], TransportSender] | None = None
    calls: tuple[str, ...] = ()
    only_sglang: tuple[int, ...] = ()
    loader: str = ""
    collective: bool = False
    rank_to_rank: bool = False
    maps_memory: bool = False
    files: bool = False


class _ActorSender:
    """Buckets to Ray actors: to the embedded engines, by what gives the buckets of a stream to them."""

    def __init__(self, hand_over: Callable[[Stream, SendPlan], SendReport]) -> None:
        self._hand_over = hand_over

    def send(self, stream: Stream, plan: SendPlan, *, label: str = "", group: ProcessGroup | None = None) -> SendReport:
        """Hand the stream over; see `TransportSender`."""
        return self._hand_over(stream, plan)

    def close(self) -> None:
        """Nothing is kept."""


def _broadcast(rank: RankEnd) -> TransportSender:
    from megatron_daro.sync.broadcast import BroadcastSender

    return BroadcastSender(rank.host, rank.backend, rank.calls)


def _handles(rank: RankEnd) -> TransportSender:
    from megatron_daro.sync.handles import HandleSender

    return HandleSender(rank.calls)


def _files(rank: RankEnd) -> TransportSender:
    from megatron_daro.sync.files import FileSender

    return FileSender()


def _actors(rank: RankEnd) -> TransportSender:
    assert rank.hand_over is not None, "this process has no actors to hand buckets to"
    return _ActorSender(rank.hand_over)


TRANSPORTS: Mapping[str, Transport] = {
    "distributed": Transport(
        sender=_broadcast,
        calls=(
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
        ),
        collective=True,
    ),
    "shards": Transport(
        calls=("/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update"),
        only_sglang=(0, 5, 23),  # whose parameters shard_layouts.py describes
        loader=LOADER,
        rank_to_rank=True,
    ),
    "tensor": Transport(sender=_handles, calls=("/update_weights_from_tensor",), maps_memory=True),
    "disk": Transport(sender=_files, calls=("/update_weights_from_disk",), files=True),
    "actor": Transport(sender=_actors),
}
"""By the names of `engine.sglang.sync`; and `actor`, on which the embedded engines get their weights."""


def transport_of(name: str) -> Transport:
    """Look a way up. Raises SyncError: there is none of that name."""
    if name not in TRANSPORTS:
        raise SyncError(f"transport of weights: got {name!r}; allowed: {', '.join(TRANSPORTS)}; fix: correct the name")
    return TRANSPORTS[name]
