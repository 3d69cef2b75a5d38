"""Which of the trainer's ranks writes which bytes into which rank of which server.

Layouts of both sides (sync/shard_layouts.py) -> `ShardPlan` -> the writes of each rank. The plan is made once, from
sizes alone. Every entry of every server parameter is written exactly once (padding never), by a rank that holds it.

Ranks that hold the same shards are a cell: replicas over data and context, all ranks of a stage for a norm, ranks of
the first and the last stage for a tied embedding. What a cell has to send, to one server after the other, is one run of
bytes, and each of its ranks sends a stretch of it. Cells of few ranks are shared out first; later ones fill up the
ranks that have less to send, so that all ranks of a stage send about as much. Between stages nothing can be balanced,
since a rank sends only what it holds. `Balance.floor` says how even any plan could be.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import ModelError
from megatron_daro.sync.shard_layouts import (
    HeldPart,
    Part,
    ServerLayout,
    TrainerLayout,
    server_parts,
    trainer_parts,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) within a parameter, in entries."""


@dataclass(frozen=True, slots=True)
class Write:
    """A box of a sender's parameter `source`, to be written into a box of parameter `target`, of shape `target_shape`,
    on one rank of one server. Both boxes have the same entries in the same order; the target's may have an additional
    first axis of length 1."""

    server: int
    rank: int
    source: str
    source_box: Box
    target: str
    target_shape: tuple[int, ...]
    target_box: Box

    @property
    def entries(self) -> int:
        """How many entries are written."""
        return math.prod(self.source_box[1])


@dataclass(frozen=True, slots=True)
class Balance:
    """Bytes that each rank sends or receives in one sync.

    sent: [trainer's ranks]. received: [ranks of a server], the same for all servers. links: pairs of a sender and a
    receiver. floor: in any plan, the busiest rank sends at least this, given what only it and its peers hold.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    links: int
    floor: float

    @property
    def over_mean(self) -> float:
        """The busiest sender's bytes divided by the mean."""
        return max(self.sent) * len(self.sent) / sum(self.sent)

    @property
    def floor_over_mean(self) -> float:
        """A lower bound of `over_mean` for any plan of these layouts."""
        return self.floor * len(self.sent) / sum(self.sent)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Entries [start, stop) along `dim` of a Hugging Face tensor for one rank of each server. target: the server's part
    they go to. sources: the trainer's parts that have them."""

    rank: int
    start: int
    stop: int
    target: Part
    sources: tuple[HeldPart, ...]

    @property
    def entries(self) -> int:
        """How many numbers they are."""
        return (self.stop - self.start) * self.target.width

    @property
    def slices(self) -> int:
        """Into how many slices, which are rows, the unit can be cut."""
        return self.target.width if self.target.dim == 1 else self.stop - self.start

    def write(self, sender: int, server: int, first: int, last: int) -> Write:
        """Return the write of slices [first, last)."""
        source = next(held.part for held in self.sources if sender in held.ranks)
        start, stop, rows = self.start, self.stop, range(first, last)
        if self.target.dim == 0:
            start, stop, rows = self.start + first, self.start + last, range(0)
        source_box, target_box = source.box(start, stop, rows), self.target.box(start, stop, rows)
        target = self.target
        return Write(server, self.rank, source.parameter, source_box, target.parameter, target.shape, target_box)


@dataclass(slots=True)
class _Cell:
    """Units, for one server, that the same ranks hold. stretches: which entries of the run for all servers each rank
    sends, as rank -> (start, stop)."""

    ranks: tuple[int, ...]
    units: list[_Unit] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Entries for one server up to the end of each unit."""
    stretches: dict[int, tuple[int, int]] = field(default_factory=dict)

    def size(self) -> int:
        """Entries for one server."""
        return self.ends[-1]


class ShardPlan:
    """The plan of one pair of layouts."""

    def __init__(
        self, shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, servers: int, *, itemsize: int = 2
    ) -> None:
        """Make the plan; send nothing.

        Args:
            shape: of the model. trainer, server: the layouts. servers: how many there are, all with the same layout.
            itemsize: bytes of an entry, in the servers' dtype.

        Raises:
            ModelError: sizes do not divide, or the trainer lacks a tensor that servers have.
        """
        self._trainer, self._server, self._servers, self._itemsize = trainer, server, servers, itemsize
        self._cells = self._make_cells(_Held(shape, trainer), shape)
        self._loads = [0] * trainer.world_size
        for cell in sorted(self._cells, key=lambda cell: len(cell.ranks)):
            self._share_out(cell)

    def writes(self, sender: int) -> Iterator[Write]:
        """Yield the writes of a trainer's rank. Ranks begin with different receivers, so that no receiver gets all at
        once."""
        stretches = [(cell, cell.stretches[sender]) for cell in self._cells if sender in cell.stretches]
        own = [write for cell, (start, stop) in stretches for write in self._cut(cell, sender, start, stop)]
        receivers = sorted({(write.server, write.rank) for write in own})
        turn = {receiver: (i - sender) % len(receivers) for i, receiver in enumerate(receivers)}
        yield from sorted(own, key=lambda write: turn[write.server, write.rank])

    def balance(self) -> Balance:
        """Return how much each rank sends and receives."""
        received = [0] * self._server.tensor
        for cell in self._cells:
            for unit in cell.units:
                received[unit.rank] += unit.entries
        links = sum(len(self._receivers(sender)) for sender in range(self._trainer.world_size))
        sent = tuple(load * self._itemsize for load in self._loads)
        return Balance(sent, tuple(n * self._itemsize for n in received), links, self._floor() * self._itemsize)

    def _make_cells(self, held: _Held, shape: ModelShape) -> list[_Cell]:
        cells: dict[tuple[int, ...], _Cell] = {}
        for rank in range(self._server.tensor):
            for part in server_parts(shape, self._server, rank):
                for start, stop, sources, ranks in held.overlaps(part):
                    cell = cells.setdefault(ranks, _Cell(ranks))
                    cell.units.append(_Unit(rank, start, stop, part, sources))
        for cell in cells.values():
            cell.ends = list(accumulate(unit.entries for unit in cell.units))
        return list(cells.values())

    def _share_out(self, cell: _Cell) -> None:
        """Give each rank of a cell its stretch, a longer one to ranks that have less to send so far."""
        at = 0
        for rank, share in zip(
            cell.ranks, _filled([self._loads[r] for r in cell.ranks], self._total(cell)), strict=True
        ):
            if share:
                start, stop = self._rounded(cell, at), self._rounded(cell, at + share)
                if start < stop:
                    cell.stretches[rank] = start, stop
                    self._loads[rank] += stop - start
            at += share

    def _total(self, cell: _Cell) -> int:
        return cell.size() * self._servers

    def _rounded(self, cell: _Cell, position: int) -> int:
        """Return the last position, not beyond this one, at which a unit can be cut."""
        if position == self._total(cell):
            return position
        server, entry = divmod(position, cell.size())
        i = bisect_right(cell.ends, entry)
        unit, start = cell.units[i], cell.ends[i - 1] if i else 0
        slice_entries = (cell.ends[i] - start) // unit.slices
        return server * cell.size() + start + (entry - start) // slice_entries * slice_entries

    def _cut(self, cell: _Cell, sender: int, start: int, stop: int) -> Iterator[Write]:
        """Yield the writes of a stretch."""
        at = start
        while at < stop:
            server, entry = divmod(at, cell.size())
            i = bisect_right(cell.ends, entry)
            unit, begin = cell.units[i], cell.ends[i - 1] if i else 0
            end = min(cell.ends[i], entry + stop - at)
            slice_entries = (cell.ends[i] - begin) // unit.slices
            yield unit.write(sender, server, (entry - begin) // slice_entries, (end - begin) // slice_entries)
            at += end - entry

    def _receivers(self, sender: int) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for cell in self._cells:
            start, stop = cell.stretches.get(sender, (0, 0))
            while start < stop:
                server, entry = divmod(start, cell.size())
                end = min(cell.size(), entry + stop - start)
                first, last = bisect_right(cell.ends, entry), bisect_right(cell.ends, end - 1)
                found |= {(server, unit.rank) for unit in cell.units[first : last + 1]}
                start += end - entry
        return found

    def _floor(self) -> float:
        """Return a lower bound, in entries, of what the busiest rank sends in any plan: the largest mean per rank over
        the ranks of any cell, of any stage, and over all ranks."""
        by_group: dict[tuple[int, ...], int] = {}
        for cell in self._cells:
            stages = {self._trainer.stage_of(rank) for rank in cell.ranks}
            every = tuple(range(self._trainer.world_size))
            groups = {cell.ranks, every}
            if len(stages) == 1:
                first = min(stages) * self._trainer.stage_ranks
                groups.add(tuple(range(first, first + self._trainer.stage_ranks)))
            for ranks in groups:
                by_group[ranks] = by_group.get(ranks, 0) + self._total(cell)
        return max(entries / len(ranks) for ranks, entries in by_group.items())


class _Held:
    """The trainer's parts by Hugging Face tensor; parts with the same entries, from several parameters or stages, are
    grouped."""

    def __init__(self, shape: ModelShape, layout: TrainerLayout) -> None:
        by_name: dict[str, dict[int, list[HeldPart]]] = {}
        for held in trainer_parts(shape, layout):
            by_name.setdefault(held.part.hf_name, {}).setdefault(held.part.start, []).append(held)
        self._by_name = {name: sorted(parts.items()) for name, parts in by_name.items()}
        self._ranks: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}

    def overlaps(self, wanted: Part) -> Iterator[tuple[int, int, tuple[HeldPart, ...], tuple[int, ...]]]:
        """Yield (start, stop, the parts that have these entries, their ranks), in order and without a gap.

        Raises:
            ModelError: the trainer has no such tensor or only some of the entries, or its ranks cut it differently.
        """
        at = wanted.start
        for start, parts in self._by_name.get(wanted.hf_name, []):
            stop = parts[0].part.stop
            if start <= at < stop and at < wanted.stop:
                if any((held.part.stop, held.part.dim) != (stop, wanted.dim) for held in parts):
                    raise ModelError(f"{wanted.hf_name}: ranks hold it cut in different ways")
                end = min(stop, wanted.stop)
                yield at, end, tuple(parts), self._all_ranks(parts)
                at = end
        if at != wanted.stop:
            raise ModelError(f"{wanted.hf_name}: no rank of the trainer has its entries from {at} on")

    def _all_ranks(self, parts: list[HeldPart]) -> tuple[int, ...]:
        """Return the ranks of all parts, ascending; equal inputs give the same tuple object."""
        key = tuple(held.ranks for held in parts)
        if key not in self._ranks:
            self._ranks[key] = tuple(sorted({rank for ranks in key for rank in ranks}))
        return self._ranks[key]


def _filled(loads: list[int], amount: int) -> list[int]:
    """Return how much of the amount each gets, so that all reach the same level, except those already above it."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    count, below = 0, 0  # how many are below the level, and the sum of their loads
    while count < len(order) and count * loads[order[count]] - below < amount:
        below += loads[order[count]]
        count += 1
    shares = [0] * len(loads)
    if count:
        level, rest = divmod(below + amount, count)
        for place, i in enumerate(order[:count]):
            shares[i] = level + (place < rest) - loads[i]
    return shares
