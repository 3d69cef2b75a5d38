"""The file that a rank writes into a checkpoint while training goes on.

A thread writes the file from the live tensors (`ShardFile.write`); `release` is called before the next update of the
weights. Tensors that are already written by then may change. Of the rest, as much as the budget allows is copied, from
the end of the file backwards, and the update waits until what lies between is written. So a save takes no memory if a
step computes longer than the file takes to write.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_daro import durable
from megatron_daro.actor import device
from megatron_daro.convert.safetensors_file import FileWriter

PIECE_BYTES = 64 * 2**20
"""A box that lies on a GPU is fetched in pieces of this size."""


@dataclass(frozen=True, slots=True)
class OwnBox:
    """Values of elements [offset, offset + shape) of a global tensor; `data` has as many elements, of any shape."""

    key: str
    data: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]


class ShardFile:
    """Named boxes that are written into one file, in order. `write` is called once, `release` from another thread."""

    def __init__(self, path: Path, boxes: Sequence[tuple[str, OwnBox]]) -> None:
        self._path = path
        self._header = [(name, box.data.dtype, box.shape) for name, box in boxes]
        self._values: list[Tensor | None] = [box.data.detach() for _, box in boxes]
        self._changed = threading.Condition()
        self._at = 0  # the box that is being read
        self._ended = self._released = False

    def write(self) -> None:
        """Write the file and its hash, which is computed on the way; both are on the disk when this returns.

        Raises:
            OSError, ModelError: the disk refused; nothing is read any more.
        """
        try:
            if not self._values:
                return
            with FileWriter(self._path, self._header, hashed=True) as file:
                for number in range(len(self._values)):
                    for piece in self._pieces(number):
                        file.write(piece)
                self._advance(len(self._values))
            durable.write_hash(self._path, file.sha256 or "")
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def release(self, most_bytes: int) -> int:
        """Wait until none of this file's original tensors is read any more. A second call does nothing.

        Args:
            most_bytes: of host memory for copies, which shorten the wait.

        Returns:
            How many bytes were copied.
        """
        if self._released:
            return 0
        first, copied = len(self._values), 0
        while first > 0:
            values = self._waiting(first - 1)
            if values is None or copied + values.nbytes > most_bytes:
                break
            if not self._replace(first - 1, values.to("cpu", copy=True)):
                break
            first, copied = first - 1, copied + values.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._at >= first)
        self._released = True
        return copied

    def _pieces(self, number: int) -> Iterator[Tensor]:
        self._advance(number)
        with self._changed:
            values = self._values[number]
        assert values is not None
        if values.device.type == "cpu" or not values.is_contiguous():
            yield device.shown(values.to("cpu"))
            return
        flat, step = values.view(-1), max(1, PIECE_BYTES // values.dtype.itemsize)
        yield from (flat[start : start + step].to("cpu") for start in range(0, len(flat), step))

    def _advance(self, number: int) -> None:
        """Note that the boxes before this one are written, and drop them."""
        with self._changed:
            self._at = number
            if number:
                self._values[number - 1] = None
            self._changed.notify_all()

    def _waiting(self, number: int) -> Tensor | None:
        """Return the values of a box that is not begun yet, else None."""
        with self._changed:
            return None if self._ended or self._at >= number else self._values[number]

    def _replace(self, number: int, copy: Tensor) -> bool:
        """Have the copy written in place of the box. Returns False if the box has been begun by now."""
        with self._changed:
            if self._ended or self._at >= number:
                return False
            self._values[number] = copy
            return True
