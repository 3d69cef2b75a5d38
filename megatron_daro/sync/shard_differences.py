"""What a rank of the trainer sent last, and how it differs from what it sends now.

One copy in host memory serves all receivers: of every box of a parameter, its bytes as of the last update that sent it.
A receiver says which update it finished; where a box is known to have had the same bytes at that one as in the copy, it
gets the difference, else all of it. So every receiver has exactly the new bytes, whatever it missed. What a difference
looks like: in_server/megatron_daro_shards.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_daro.sync.in_server.megatron_daro_shards import (
    BITS,
    GAPS,
    LONGEST_GAP,
    SAME,
    WHOLE,
    header_of,
    sum_of,
)
from megatron_daro.sync.shard_plan import Box

_MOST_UPDATES = 1024
"""Updates whose names are known; a receiver that has an older one gets everything."""
_ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Change:
    """How the bytes of a piece become others: see the docstring of in_server/megatron_daro_shards.py."""

    kind: int
    values: memoryview | bytes = b""
    places: memoryview | bytes = b""

    @property
    def num_bytes(self) -> int:
        """That are sent."""
        return len(self.header) + len(self.values) + len(self.places)

    @property
    def header(self) -> bytes:
        """What is sent before values and places."""
        return header_of(self.kind, len(self.values), len(self.places))


@dataclass(slots=True)
class _Kept:
    """A box as of update `last`: its bytes, their sum, and since which update it is known to have had them. change: to
    that, while this update runs, from what it was at all updates in `base`."""

    held: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    total: int = 0
    since: int = 0
    last: int = 0
    base: range = range(0)
    change: Change = Change(SAME)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, number: int, new: np.ndarray, element_size: int) -> None:
        """Have it as of an update. Args: new: uint8 [its bytes]; element_size: bytes of an element."""
        if self.last:
            elements = _ELEMENTS[element_size]
            self.base = range(self.since, self.last + 1)
            self.change = change(self.held.view(elements), new.view(elements))
        else:
            self.held, self.change = new.copy(), Change(WHOLE)
        if self.change.kind != SAME:
            self.total = sum_of(self.held.data)
        if self.change.kind != SAME or self.last < number - 1:  # what it was at those in between nobody looked at
            self.since = number
        self.last = number

    def change_from(self, number: int) -> Change:
        """Return how one who has it as of this update (0: who has nothing) comes to have it as it is."""
        if number in self.base and self.change.kind != WHOLE:
            return self.change
        return Change(WHOLE, self.held.data)


class SentPieces:
    """The copy of one rank. Threads may take pieces at once."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._kept: dict[str, dict[Box, _Kept]] = {}
        self._numbers: dict[str, int] = {}
        self._last, self._open = 0, 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """That are held."""
        return sum(kept.held.nbytes for boxes in self._kept.values() for kept in boxes.values())

    def begin(self, update: str) -> int:
        """Begin an update of this name. Returns its number."""
        with self._lock:
            self._open = self._last = self._last + 1
            self._numbers[update] = self._open
            if len(self._numbers) > _MOST_UPDATES:
                del self._numbers[next(iter(self._numbers))]
            return self._open

    def take(
        self, number: int, source: str, box: Box, element_size: int, read: Callable[[], memoryview], held: str | None
    ) -> tuple[Change, int]:
        """Return what a receiver needs to have the bytes of a box as they are now, and their sum.

        Args:
            number: of the update. source, box: of this rank's parameters. element_size: bytes of one of its elements.
            read: returns its bytes as they are now; called once in an update. held: the update that the receiver has.

        Raises:
            ConnectionError: the update has ended.
        """
        with self._lock:
            kept = self._kept.setdefault(source, {}).setdefault(box, _Kept())
            base = self._numbers.get(held or "", 0)
        with kept.lock:
            if number != self._open:
                raise ConnectionError("the update has ended")
            if kept.last < number:
                kept.renew(number, np.frombuffer(read(), np.uint8), element_size)
            return kept.change_from(base), kept.total

    def end(self) -> None:
        """End the update: nothing is read any more. What is needed for it alone is forgotten, and so are boxes that
        overlap with others that it sent."""
        with self._lock:
            number, self._open = self._open, 0
            for boxes in self._kept.values():
                sent = [box for box, kept in boxes.items() if kept.last == number]
                for box, kept in list(boxes.items()):
                    with kept.lock:  # nobody reads
                        kept.base, kept.change = range(0), Change(SAME)
                    if kept.last != number and any(_overlap(box, other) for other in sent):
                        del boxes[box]


def change(old: np.ndarray, new: np.ndarray) -> Change:
    """Make `old` what `new` is, and return how: in the fewest bytes, or as WHOLE, without them.

    Args:
        old, new: unsigned integers [elements]; compared bit by bit.
    """
    differs = old != new
    at = np.flatnonzero(differs)
    if not len(at):
        return Change(SAME)
    kind = BITS if 8 * len(at) > len(new) else GAPS
    places = np.packbits(differs) if kind == BITS else _packed_gaps(np.diff(at, prepend=-1) - 1)
    if len(at) * new.itemsize + len(places) >= new.nbytes:
        np.copyto(old, new)
        return Change(WHOLE)
    values = new[at]
    old[at] = values
    return Change(kind, values.view(np.uint8).data, places.data)


def _packed_gaps(gaps: np.ndarray) -> np.ndarray:
    """Return each gap as a byte after one of 255 for each whole 255, uint8."""
    far = np.flatnonzero(gaps >= LONGEST_GAP)
    times, gaps[far] = np.divmod(gaps[far], LONGEST_GAP)
    return np.insert(gaps.astype(np.uint8), np.repeat(far, times), LONGEST_GAP)


def _overlap(box: Box, other: Box) -> bool:
    """Whether two boxes of a parameter have an entry in common."""
    sides = zip(*box, *other, strict=True)
    return all(at < other_at + other_n and other_at < at + n for at, n, other_at, other_n in sides)
