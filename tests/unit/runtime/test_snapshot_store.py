"""Copies of snapshots: bit for bit, whole or refused, and never a mixture of two."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT
from megatron_daro.errors import WorkerError
from megatron_daro.runtime import snapshot_store
from megatron_daro.runtime.snapshot_store import SnapshotStore, Source

STORAGES = {"weights": (7, 900, 0, 41), "optimizer": (1500, 3)}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """Calls of handles are done at once; an answer is itself."""
    monkeypatch.setattr(snapshot_store, "ray", SimpleNamespace(get=lambda answer, timeout: answer))


class Handle:
    """Another process; `left` calls are answered before it dies."""

    def __init__(self, states, left=10**9):
        self._states, self._left = states, left

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self._answer(name, arguments))

    def _answer(self, name, arguments):
        self._left -= 1
        if self._left < 0:
            raise ConnectionError("it died")
        return getattr(self._states, name)(*arguments)


def content(serial, kind):
    return np.random.default_rng([serial, len(kind)]).integers(0, 256, sum(STORAGES[kind]), dtype=np.uint8)


def take(states, serial, keep=None):
    """What PendingSnapshot does, into blocks of 512 bytes."""
    slot = states.own.open(keep)
    for kind in KINDS_OF_SNAPSHOT:
        values = torch.from_numpy(content(serial, kind))
        blocks = slot.blocks.setdefault(
            kind, [torch.empty(512, dtype=torch.uint8) for _ in range(-(-len(values) // 512))]
        )
        for block, part in zip(blocks, values.split(512), strict=True):
            block[: len(part)] = part
    slot.layout, slot.rest, slot.serial = dict(STORAGES), {"serial": serial}, serial


def held(slot, kind):
    return torch.cat(slot.blocks[kind]).numpy()[: sum(slot.layout[kind])]


def assert_adopted(sources, serial):
    fresh = SnapshotStore()
    fresh.adopt(serial, sources)
    slot = fresh.whole(serial)
    assert slot.layout == STORAGES and slot.rest == {"serial": serial}
    for kind in KINDS_OF_SNAPSHOT:
        np.testing.assert_array_equal(held(slot, kind), content(serial, kind))


def test_a_copy_and_what_is_adopted_from_it_are_bit_for_bit_the_snapshot():
    rank, peer = SnapshotStore(), SnapshotStore()
    for serial in (1, 2, 3):
        take(rank, serial, keep=serial - 1)
        rank.send(5, serial, serial - 1, Handle(peer), KINDS_OF_SNAPSHOT)
    assert peer.serials.copies == {5: (2, 3)} and peer.serials.own == () and rank.serials.own == (2, 3)
    for serial in (2, 3):
        assert_adopted([Source(Handle(peer), 5, KINDS_OF_SNAPSHOT, rest=True)], serial)


def test_weights_come_from_a_replica_and_the_rest_from_the_peer():
    rank, peer, replica = SnapshotStore(), SnapshotStore(), SnapshotStore()
    take(rank, 4)
    take(replica, 4)
    rank.send(0, 4, None, Handle(peer), ("optimizer",))
    assert peer.describe(0, 4).layout.keys() == {"optimizer"}
    parts = [
        Source(Handle(replica), None, ("weights",), rest=False),
        Source(Handle(peer), 0, ("optimizer",), rest=True),
    ]
    assert_adopted(parts, 4)


@pytest.mark.parametrize("calls", range(8))
def test_a_copy_that_breaks_off_leaves_the_one_before(calls):
    """1 opening, 2 blocks of weights, 3 of the optimizer, 1 sealing."""
    rank, peer = SnapshotStore(), SnapshotStore()
    take(rank, 1)
    rank.send(0, 1, None, Handle(peer), KINDS_OF_SNAPSHOT)
    take(rank, 2, keep=1)
    if calls == 7:
        rank.send(0, 2, 1, Handle(peer, calls), KINDS_OF_SNAPSHOT)
        assert peer.serials.copies[0] == (1, 2)
    else:
        with pytest.raises(ConnectionError):
            rank.send(0, 2, 1, Handle(peer, calls), KINDS_OF_SNAPSHOT)
        assert peer.serials.copies[0] == (1,)
        with pytest.raises(WorkerError, match=r"snapshot 2.*rank 0"):
            peer.describe(0, 2)
    assert_adopted([Source(Handle(peer), 0, KINDS_OF_SNAPSHOT, rest=True)], 1)


def test_late_and_missing_blocks_are_refused():
    peer = SnapshotStore()
    peer.open_copy(0, 1, None)
    peer.open_copy(0, 2, None)  # by the process that took the place of the first
    with pytest.raises(WorkerError, match=r"rank 0.*snapshot 1"):
        peer.take_block(0, 1, "weights", 0, np.zeros(4, np.uint8))
    peer.take_block(0, 2, "weights", 0, np.zeros(4, np.uint8))
    with pytest.raises(WorkerError, match="torn"):
        peer.seal_copy(0, 2, {"weights": (5,)}, {})
    assert peer.serials.copies == {0: ()}


def test_nobody_has_what_is_adopted():
    with pytest.raises(WorkerError, match="snapshot 7"):
        SnapshotStore().adopt(7, [Source(Handle(SnapshotStore()), None, KINDS_OF_SNAPSHOT, rest=True)])
