"""Where snapshots are kept: peers, what they are sent, what fits into memory, which processes have the state of a lost
rank.

`Healing` calls these functions, which depend only on where the ranks are and what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ray.actor import ActorHandle

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.snapshot_store import SnapshotSerials, Source
from megatron_daro.types import MemoryKind

Keeps = Literal["both", "peer", "none"]
"""Who keeps the committed snapshot of a rank while the next is taken: the rank itself and its peer; the peer alone;
nobody."""
_GIB = 2**30


def peers_of(infos: Sequence[RankInfo]) -> list[int | None]:
    """Return, for each rank, its peer, which keeps a copy of its snapshots: a replica on another host (or on the only
    host), whose own snapshot has the same weights; without such a replica, any rank of the next host (on the only host:
    the one half the ranks away). None: there is no other rank."""
    hosts, by_weights = [info.host for info in infos], dict[tuple[int, ...], list[int]]()
    for rank, info in enumerate(infos):
        by_weights.setdefault(info.weights_key, []).append(rank)
    peers = _around(hosts)
    for replicas in by_weights.values():
        own_hosts = [hosts[rank] for rank in replicas]
        if len(replicas) > 1 and (len(set(own_hosts)) > 1 or len(set(hosts)) == 1):
            for rank, peer in zip(replicas, _around(own_hosts), strict=True):
                assert peer is not None
                peers[rank] = replicas[peer]
    return peers


def _around(hosts: Sequence[str]) -> list[int | None]:
    """Return, for each rank, one on the next host if there are several; on a single host, the one half the ranks away,
    so that few pairs of deaths lose a state. None: there is no other rank.

    Args:
        hosts: of each rank.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if len(by_host) == 1:
        world = len(hosts)
        return [None] if world == 1 else [(rank + world // 2) % world for rank in range(world)]
    order = list(by_host)
    following = {host: by_host[order[(i + 1) % len(order)]] for i, host in enumerate(order)}
    return [following[host][by_host[host].index(rank) % len(following[host])] for rank, host in enumerate(hosts)]


def kinds_sent(infos: Sequence[RankInfo], keeps: Keeps) -> list[tuple[MemoryKind, ...]]:
    """Return what each rank sends to its peer: no weights if the peer's own snapshot has them."""
    return [
        ("optimizer",)
        if keeps == "both" and peer is not None and infos[peer].weights_key == info.weights_key
        else KINDS_OF_SNAPSHOT
        for info, peer in zip(infos, peers_of(infos), strict=True)
    ]


def affordable(
    infos: Sequence[RankInfo],
    sizes: Sequence[Mapping[MemoryKind, int]],
    free: Sequence[int],
    memory_gib: float | None,
) -> tuple[Keeps, float, float]:
    """Return which snapshots fit into every node's memory, the GiB that they take on the fullest node, and the GiB that
    they may take there.

    Args:
        infos, sizes, free: of each rank: its part, bytes of its snapshot, free bytes of its node.
        memory_gib: limit on each node; None: half of the free memory.
    """
    hosts = [info.host for info in infos]
    peers, limits = peers_of(infos), dict[str, float]()
    for host, available in zip(hosts, free, strict=True):
        allowed = available / 2 if memory_gib is None else memory_gib * _GIB
        limits[host] = min(limits.get(host, allowed), allowed)
    if peers == [None]:
        return "none", 0.0, limits[hosts[0]] / _GIB
    tried = 0.0
    levels: tuple[tuple[Keeps, int], ...] = (("both", 2), ("peer", 1))
    for keeps, own in levels:
        taken, sent = dict.fromkeys(limits, 0), kinds_sent(infos, keeps)
        for rank, peer in enumerate(peers):
            assert peer is not None
            taken[hosts[rank]] += own * sum(sizes[rank].values())
            taken[hosts[peer]] += 2 * sum(sizes[rank][kind] for kind in sent[rank])
        fullest = max(taken, key=lambda host: taken[host] / max(limits[host], 1))
        tried = taken[fullest] / _GIB
        if all(taken[host] <= limits[host] for host in taken):
            return keeps, tried, limits[fullest] / _GIB
    return "none", tried, limits[fullest] / _GIB


def sources_of(
    serial: int, serials: Mapping[int, SnapshotSerials], infos: Sequence[RankInfo], workers: Sequence[ActorHandle]
) -> dict[int, list[Source]] | int:
    """Return where the ranks that lack a snapshot get it; or the first rank whose state no process has.

    Args:
        serial: of the snapshot. serials: what living processes have, by rank. infos, workers: of all ranks.
    """
    sources: dict[int, list[Source]] = {}
    for rank, info in enumerate(infos):
        if rank in serials and serial in serials[rank].own:
            continue
        holder = next((other for other, has in serials.items() if serial in has.copies.get(rank, ())), None)
        if holder is None:
            return rank
        replica = next(
            (o for o, has in serials.items() if serial in has.own and infos[o].weights_key == info.weights_key), None
        )
        if replica is None:
            sources[rank] = [Source(workers[holder], rank, KINDS_OF_SNAPSHOT, rest=True)]
        else:
            sources[rank] = [
                Source(workers[replica], None, ("weights",), rest=False),
                Source(workers[holder], rank, ("optimizer",), rest=True),
            ]
    return sources
