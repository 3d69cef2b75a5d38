"""Host memory of snapshots: a slot holds one snapshot, and has its number only while it is whole.

Of two slots, the one with the snapshot that all ranks have is not overwritten by the next one, so a rank that dies
meanwhile leaves nothing torn behind. runtime/snapshot_store.py keeps copies of other ranks' snapshots in this way too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_daro.types import KINDS_OF_MEMORY, MemoryKind

KINDS_OF_SNAPSHOT = tuple(kind for kind in KINDS_OF_MEMORY if kind != "gradients")
"""What is copied; gradients are not, since a step begins with zeros."""
Layout = dict[MemoryKind, tuple[int, ...]]
"""Bytes of each storage, in order."""


@dataclass(slots=True, eq=False)
class Slot:
    """Host memory of one snapshot.

    serial: its number; None while it is not whole. layout: of the storages whose content the blocks have, one after the
    other, by kind. blocks: uint8, reused for the next snapshot. rest: small state, as plain values and tensors.
    """

    serial: int | None = None
    layout: Layout = field(default_factory=dict)
    blocks: dict[MemoryKind, list[Tensor]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)


class DoubleBuffer:
    """The snapshots of one rank: at most as many as there are slots."""

    def __init__(self, slots: int = 2) -> None:
        """Allocate nothing yet. Args: slots: 2, or 1 if another process keeps the snapshot that must stay."""
        self._slots = [Slot() for _ in range(slots)]

    @property
    def serials(self) -> tuple[int, ...]:
        """Numbers of the snapshots that are whole."""
        return tuple(sorted({slot.serial for slot in self._slots if slot.serial is not None}))

    def open(self, keep: int | None) -> Slot:
        """Return the slot for the next snapshot; from now on it is not whole. Args: keep: the snapshot that must stay,
        if there is another slot."""
        free = [slot for slot in self._slots if slot.serial is None or slot.serial != keep] or self._slots
        slot = min(free, key=lambda one: -1 if one.serial is None else one.serial)
        slot.serial = None
        return slot

    def whole(self, serial: int) -> Slot | None:
        """Return the snapshot of this number; None where there is none, or it is not whole."""
        return next((slot for slot in self._slots if slot.serial == serial), None)


def num_bytes(layout: Layout) -> dict[MemoryKind, int]:
    """Return the bytes of each kind."""
    return {kind: sum(sizes) for kind, sizes in layout.items()}
