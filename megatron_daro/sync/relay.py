"""Weights by handles of GPU memory on more than one host: which rank hands them out where, and buckets between hosts.

A plan of all servers -> `routes` -> a plan for each rank that hands out. On the host of the stage's sending rank this
is that rank. On another host it is a rank which takes part in the export, and so has every tensor; where none does, the
sending rank broadcasts each bucket to a rank there, which hands it on. So the bytes reach a host once, whatever the
layout and however many servers it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megatron_daro.errors import SyncError
from megatron_daro.sync.buckets import WeightBucket
from megatron_daro.sync.plan import SendPlan, SendReport


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is. exports: it takes part in the export of the stage. sends: it is the first of those."""

    host: str
    exports: bool
    sends: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """Who hands out what. plans: rank -> servers of its host, for ranks that export; relays: the same for those that
    are told each bucket by the sender."""

    sender: int
    plans: Mapping[int, SendPlan]
    relays: Mapping[int, SendPlan] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the group that buckets are broadcast in, the sender first; empty where nothing is."""
        return (self.sender, *self.relays) if self.relays else ()


def routes(plan: SendPlan, standings: Mapping[int, Standing]) -> Routes:
    """Deal the servers of a plan out to ranks of their hosts.

    Args:
        plan: to all servers. standings: rank -> where it is, all ranks of the policy.

    Raises:
        SyncError: a server's host has no rank.
    """
    sender = next(rank for rank, standing in standings.items() if standing.sends)
    if plan.transport != "tensor" or len({standing.host for standing in standings.values()}) == 1:
        return Routes(sender, {sender: plan})
    plans, relays = {sender: replace(plan, targets=())}, dict[int, SendPlan]()
    for host in dict.fromkeys(urlsplit(target.url).hostname or "" for target in plan.targets):
        own = replace(plan, targets=tuple(t for t in plan.targets if (urlsplit(t.url).hostname or "") == host))
        here = [rank for rank, standing in standings.items() if standing.host == host]
        exporting = [rank for rank in here if standings[rank].exports]
        if sender in here:
            plans[sender] = own
        elif exporting:
            plans[exporting[0]] = own
        elif here:
            relays[here[0]] = own
        else:
            names = ", ".join(target.name for target in own.targets)
            hosts = ", ".join(sorted({standing.host for standing in standings.values()}))
            raise SyncError(
                f"engine.sglang.sync: got tensor for {names} on {host}, where no rank of the actor is (they are on "
                f"{hosts}): GPU memory is handed over within a host; set engine.sglang.sync=distributed"
            )
    return Routes(sender, plans, relays)


def joined(routes: Routes, reports: Mapping[int, SendReport]) -> SendReport:
    """Return the sender's report with the failures of all: the others sent the same once more."""
    failures = {name: failure for report in reports.values() for name, failure in report.failures.items()}
    return replace(reports[routes.sender], failures=failures, send_s=max(report.send_s for report in reports.values()))


def passed_on(buckets: Iterable[WeightBucket], group: dist.ProcessGroup) -> Iterator[WeightBucket]:
    """Yield each bucket after it was broadcast from this rank, the first of the group, and then tell the end."""
    try:
        for bucket in buckets:
            _announce((bucket.names, bucket.shapes, bucket.dtype, bucket.data.nbytes), group)
            dist.broadcast(bucket.data, dist.get_global_rank(group, 0), group=group)
            yield bucket
    finally:
        _announce(None, group)


def received(group: dist.ProcessGroup, device: torch.device) -> Iterator[WeightBucket]:
    """Yield the buckets that the first rank of the group broadcasts, each in memory of its own, until it tells the
    end. Must be read to its end, or the others wait."""
    while (header := _announce(None, group)) is not None:
        names, shapes, dtype, num_bytes = header
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
        yield WeightBucket(names, shapes, dtype, data)


_Header = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], str, int]


def _announce(header: _Header | None, group: dist.ProcessGroup) -> _Header | None:
    """Return what the group's first rank says is next; None: nothing. Only that rank's argument counts."""
    said: list[_Header | None] = [header]
    dist.broadcast_object_list(said, dist.get_global_rank(group, 0), group=group)
    return said[0]


def groups_of(members: Sequence[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make torch's groups of these ranks. Collective over all ranks of the policy, each with the same argument."""
    found = {tuple(ranks): dist.new_group(list(ranks)) for ranks in members}
    mine = dist.get_rank()
    return {ranks: group for ranks, group in found.items() if mine in ranks}
