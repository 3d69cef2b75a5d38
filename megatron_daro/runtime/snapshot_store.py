"""The snapshots that a rank's process keeps: its own, and copies of those of other ranks.

They outlive the policy of the process, which is built anew when another rank is replaced. Copies travel from process to
process through the object store, block by block, and never through the driver. A copy is whole once it is sealed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import ray
import torch
from ray.actor import ActorHandle

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT, DoubleBuffer, Layout, Slot, num_bytes
from megatron_daro.errors import WorkerError
from megatron_daro.types import MemoryKind

SEND_S = 600.0
"""How long another process may take to receive, or give, one block."""


@dataclass(frozen=True, slots=True)
class SnapshotSerials:
    """Numbers of the whole snapshots in a process. own: of its own rank. copies: of other ranks, by rank."""

    own: tuple[int, ...]
    copies: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rank gets a part of a snapshot.

    owner: the rank of whose snapshot that process has a copy; None: its own snapshot. kinds: of memory. rest: whether
    the small rest of the state comes from there too.
    """

    worker: ActorHandle
    owner: int | None
    kinds: tuple[MemoryKind, ...]
    rest: bool


@dataclass(frozen=True, slots=True)
class Description:
    """What describes a snapshot before its blocks are sent. blocks: their number, by kind."""

    layout: Layout
    blocks: Mapping[MemoryKind, int]
    rest: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Incoming:
    """A copy that is not whole yet. got: bytes that came, by kind."""

    serial: int
    slot: Slot
    got: Counter[MemoryKind] = field(default_factory=Counter)


class SnapshotStore:
    """The snapshots in this process."""

    def __init__(self) -> None:
        """Take no memory."""
        self.own = DoubleBuffer()
        self._copies: dict[int, DoubleBuffer] = {}
        self._incoming: dict[int, _Incoming] = {}  # by the rank that they are copies of

    @property
    def serials(self) -> SnapshotSerials:
        """Numbers of the snapshots that are whole."""
        copies = list(self._copies.items())  # while another thread adds one
        return SnapshotSerials(self.own.serials, {rank: buffer.serials for rank, buffer in copies})

    def keep_own_twice(self, twice: bool) -> None:
        """Set whether the newest own snapshot is kept here while the next is taken; otherwise only the peer's copy
        is."""
        self.own = DoubleBuffer(2 if twice else 1)

    def send(self, rank: int, serial: int, keep: int | None, peer: ActorHandle, kinds: Collection[MemoryKind]) -> None:
        """Send a copy of this rank's snapshot to another process; one block is read while the previous one is received.

        Args:
            rank: this one. serial: of a whole snapshot. keep: the snapshot of which the peer's copy must stay. kinds:
                what the peer gets.

        Raises:
            RayError: the peer is gone. WorkerError: the slot was reused for another snapshot, since ranks were
                replaced.
        """
        slot = self._whole(None, serial)
        layout, rest = {kind: slot.layout[kind] for kind in kinds}, slot.rest
        before: object = peer.open_copy.remote(rank, serial, keep)
        for kind in kinds:
            for number, block in enumerate(_blocks(slot, kind)):
                taken = peer.take_block.remote(rank, serial, kind, number, block)
                ray.get(before, timeout=SEND_S)
                before = taken
                self._whole(None, serial)  # still
        ray.get(before, timeout=SEND_S)
        ray.get(peer.seal_copy.remote(rank, serial, layout, rest), timeout=SEND_S)

    def open_copy(self, rank: int, serial: int, keep: int | None) -> None:
        """Begin a copy of another rank's snapshot; an earlier copy of this rank that was not sealed is forgotten."""
        if rank not in self._copies:
            self._copies[rank] = DoubleBuffer()
        self._incoming[rank] = _Incoming(serial, self._copies[rank].open(keep))

    def take_block(self, rank: int, serial: int, kind: MemoryKind, number: int, block: np.ndarray) -> None:
        """Take a block of the copy that was begun. Raises WorkerError: the block is of another copy."""
        incoming = self._of(rank, serial)
        _fill(incoming.slot.blocks.setdefault(kind, []), number, block)
        incoming.got[kind] += len(block)

    def seal_copy(self, rank: int, serial: int, layout: Layout, rest: dict[str, Any]) -> None:
        """Mark the copy as whole. Raises WorkerError: blocks are missing, or another copy was begun."""
        incoming = self._of(rank, serial)
        _check_bytes(layout, incoming.got, f"the copy of rank {rank}'s snapshot {serial}")
        del self._incoming[rank]
        incoming.slot.layout, incoming.slot.rest, incoming.slot.serial = layout, rest, serial

    def _of(self, rank: int, serial: int) -> _Incoming:
        incoming = self._incoming.get(rank)
        if incoming is None or incoming.serial != serial:  # a call of a process that has died since
            raise WorkerError(f"a part of rank {rank}'s snapshot {serial} came late; what is awaited: {incoming}")
        return incoming

    def keep_copies(self, ranks: Collection[int]) -> None:
        """Forget the copies of all other ranks: another process is their peer now."""
        self._copies = {rank: buffer for rank, buffer in self._copies.items() if rank in ranks}
        self._incoming = {rank: incoming for rank, incoming in self._incoming.items() if rank in ranks}

    def describe(self, owner: int | None, serial: int) -> Description:
        """Return the description of a snapshot. Args: owner: the rank of a copy; None: this process's own."""
        slot = self._whole(owner, serial)
        blocks = {kind: sum(1 for _ in _blocks(slot, kind)) for kind in slot.layout}
        return Description(slot.layout, blocks, slot.rest)

    def block(self, owner: int | None, serial: int, kind: MemoryKind, number: int) -> np.ndarray:
        """Return a block of a snapshot, uint8 [bytes]."""
        return next(block for i, block in enumerate(_blocks(self._whole(owner, serial), kind)) if i == number)

    def adopt(self, serial: int, sources: Collection[Source]) -> None:
        """Make this process's own snapshot from parts that other processes have. Raises WorkerError: they do not have
        all of it; RayError: one of them is gone."""
        slot = self.own.open(None)
        slot.layout, slot.rest = {}, {}
        got: Counter[MemoryKind] = Counter()
        for source in sources:
            found = cast(Description, ray.get(source.worker.describe.remote(source.owner, serial), timeout=SEND_S))
            slot.rest = found.rest if source.rest else slot.rest
            for kind in source.kinds:
                slot.layout[kind] = found.layout[kind]
                for number in range(found.blocks[kind]):
                    taken: object = source.worker.block.remote(source.owner, serial, kind, number)
                    block = cast(np.ndarray, ray.get(taken, timeout=SEND_S))
                    _fill(slot.blocks.setdefault(kind, []), number, block)
                    got[kind] += len(block)
        slot.layout = {kind: slot.layout[kind] for kind in KINDS_OF_SNAPSHOT}
        _check_bytes(slot.layout, got, f"snapshot {serial}")
        slot.serial = serial

    def whole(self, serial: int) -> Slot:
        """Return this process's own snapshot of this number. Raises WorkerError: there is none."""
        return self._whole(None, serial)

    def _whole(self, owner: int | None, serial: int) -> Slot:
        buffer = self.own if owner is None else self._copies.get(owner)
        slot = buffer.whole(serial) if buffer else None
        if slot is None:
            whose, has = "its own" if owner is None else f"rank {owner}'s", buffer.serials if buffer else ()
            raise WorkerError(f"snapshot {serial} ({whose}) is not whole in this process, which has {has}")
        return slot


def _blocks(slot: Slot, kind: MemoryKind) -> Iterator[np.ndarray]:
    """Yield each block, the last one as far as it is used."""
    left = sum(slot.layout[kind])
    for block in slot.blocks.get(kind, ()):
        if left > 0:
            yield block.numpy()[:left]
        left -= block.numel()


def _fill(blocks: list[torch.Tensor], number: int, values: np.ndarray) -> None:
    """Copy a block into the list, reusing the block there if it has the same size."""
    if number == len(blocks):
        blocks.append(torch.empty(len(values), dtype=torch.uint8))
    if blocks[number].numel() != len(values):
        blocks[number] = torch.empty(len(values), dtype=torch.uint8)
    blocks[number].numpy()[:] = values


def _check_bytes(layout: Layout, got: Mapping[MemoryKind, int], what: str) -> None:
    if wrong := {
        kind: (got.get(kind, 0), size) for kind, size in num_bytes(layout).items() if got.get(kind, 0) != size
    }:
        raise WorkerError(f"{what} is torn: bytes that came, and its size: {wrong}")
