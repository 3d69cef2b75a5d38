"""Buckets on their way to a rank of another host, which hands them out there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_daro.sync.buckets import WeightBucket


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
    header_of_rank: list[_Header | None] = [header]
    dist.broadcast_object_list(header_of_rank, dist.get_global_rank(group, 0), group=group)
    return header_of_rank[0]


def groups_of(members: Sequence[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make torch's groups of these ranks. Collective over all ranks of the policy, each with the same argument."""
    groups = {tuple(ranks): dist.new_group(list(ranks)) for ranks in members}
    mine = dist.get_rank()
    return {ranks: group for ranks, group in groups.items() if mine in ranks}
