"""Boxes of tensors in files: where their bytes are, and how any other box of the same tensor is read from them.

HF checkpoints and both Megatron formats are lists of `Piece`; loading ranks, the converter and its verification ask for
boxes. Only the bytes of a box are read, and by plain reads: pages of a mapped file count as memory of the process, so a
conversion would seem to hold the whole model. Refuses a box that the pieces do not cover.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_daro.errors import CheckpointError, DaroError

_MOST_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [offset, offset + shape) of a tensor of `global_shape`, stored in row-major order from byte `start` of a
    file."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    start: int


class Box(Protocol):
    """Elements [offset, offset + shape) of a tensor."""

    @property
    def offset(self) -> tuple[int, ...]:
        """The first element along each axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""


B = TypeVar("B", bound=Box)


class BoxIndex(Generic[B]):
    """An index by place of the stored boxes of one tensor; a tensor of all experts of all layers has thousands.

    Along each axis in turn, boxes that begin at the same element form a group, and the groups are sorted.

    Args:
        boxes: all with the same number of axes. axis: the first axis to group by.
    """

    def __init__(self, boxes: Sequence[B], axis: int = 0) -> None:
        self._axis = axis
        self._boxes = boxes
        self._starts: list[int] = []
        if len(boxes) < 2 or axis == len(boxes[0].offset):
            return
        groups: dict[int, list[B]] = {}
        for box in boxes:
            groups.setdefault(box.offset[axis], []).append(box)
        self._starts = sorted(groups)
        self._longest = max(box.shape[axis] for box in boxes)
        self._groups = [BoxIndex(groups[start], axis + 1) for start in self._starts]

    def near(self, offset: Sequence[int], shape: Sequence[int]) -> Iterator[B]:
        """Yield every box that overlaps with [offset, offset + shape), and few others."""
        if not self._starts:
            yield from self._boxes
            return
        start = offset[self._axis]
        first = bisect.bisect_right(self._starts, start - self._longest)
        last = bisect.bisect_left(self._starts, start + shape[self._axis])
        for group in self._groups[first:last]:
            yield from group.near(offset, shape)


class PieceStore(ABC):
    """Tensors by key, each stored as boxes.

    Attributes:
        bytes_read: bytes of tensors read so far.
        error: class of the error that is raised if a file cannot be read.
    """

    error: type[DaroError] = CheckpointError

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._indexes: dict[str, BoxIndex[Any]] = {}

    @abstractmethod
    def keys(self) -> list[str]:
        """Return every key, sorted."""

    @abstractmethod
    def boxes(self, key: str) -> Sequence[Box]:
        """Return the stored boxes of a tensor, at least one. Raises the store's error if there is no such key."""

    @abstractmethod
    def piece(self, key: str, box: Any) -> Piece:
        """Return where the bytes of one of `boxes` are. Raises the store's error if its file is torn."""

    @abstractmethod
    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the tensor."""
        return self.piece(key, self.boxes(key)[0]).dtype

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the elements [offset, offset + shape).

        Args:
            key: of the tensor. offset, shape: of the box. out: a tensor of this shape, any dtype and device, which is
                filled and returned, without another copy if it is a contiguous CPU tensor of the file's dtype. None: a
                new CPU tensor.

        Raises:
            DaroError: the store's error: there is no such tensor, the pieces do not cover the box or overlap in it, or
                a file cannot be read.
        """
        if key not in self._indexes:
            self._indexes[key] = BoxIndex(self.boxes(key))
        windows = []
        for stored in self._indexes[key].near(offset, shape):
            both = overlap(offset, shape, stored.offset, stored.shape)
            if both is not None:
                windows.append((self.piece(key, stored), *both))
        check_disjoint(key, [piece for piece, _, _ in windows], self.error)
        filled = sum(math.prod(s.stop - s.start for s in ours) for _, _, ours in windows)
        if filled != math.prod(shape):
            where = self.piece(key, self.boxes(key)[0]).path.parent
            raise self.error(f"{key}: {filled} of {math.prod(shape)} elements are in {where}; it is incomplete")
        values = torch.empty(tuple(shape), dtype=self.dtype(key)) if out is None else out
        for piece, theirs, ours in windows:
            self._read_window(piece, theirs, values[ours])
        return values

    def close(self) -> None:
        """Close the files; they are opened again when needed."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _read_window(self, piece: Piece, window: Sequence[slice], target: Tensor) -> None:
        """Read a part of one piece into `target`; `window` has a slice for each axis."""
        if target.numel() == 0:
            return
        is_plain = target.dtype == piece.dtype and target.device.type == "cpu" and target.is_contiguous()
        result = target.detach() if is_plain else torch.empty(target.shape, dtype=piece.dtype)
        target_bytes = _memory_of(result)
        at = 0
        for start, length in byte_runs(piece.shape, window, piece.dtype.itemsize):
            self._read_into(piece, piece.start + start, target_bytes[at : at + length])
            at += length
        self.bytes_read += at
        if not is_plain:
            target.copy_(result)

    def _read_into(self, piece: Piece, start: int, target: memoryview) -> None:
        try:
            file = self._file(piece.path)
            while target:
                count = os.preadv(file, [target], start)
                if count == 0:
                    raise self.error(f"{piece.path} ends before {piece.key} does: it is torn; copy or write it again")
                start, target = start + count, target[count:]
        except OSError as error:
            raise self.error(f"{piece.path} cannot be read for {piece.key}: {error}; copy or write it again") from error

    def _file(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        self._open.move_to_end(path)
        return self._open[path]


def byte_runs(shape: Sequence[int], window: Sequence[slice], itemsize: int) -> Iterable[tuple[int, int]]:
    """Yield where the bytes of a window of a row-major array are, in as few runs as possible.

    Args:
        shape: of the array. window: a slice with start and stop for each axis. itemsize: bytes of an element.

    Yields:
        (first byte, number of bytes), ascending.
    """
    whole = len(shape)  # axes from here on are taken whole
    while whole and (window[whole - 1].start, window[whole - 1].stop) == (0, shape[whole - 1]):
        whole -= 1
    if whole == 0:
        yield 0, math.prod(shape) * itemsize
        return
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    last = whole - 1
    length = (window[last].stop - window[last].start) * strides[last]
    for index in itertools.product(*(range(s.start, s.stop) for s in window[:last])):
        outer = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield outer + window[last].start * strides[last], length


def _memory_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as writable memory, valid while the tensor exists. It does not go
    through numpy, since torch never resizes a storage again that numpy has seen, and weights release and regain their
    memory."""
    memory = (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())
    return memoryview(memory).cast("B")


def overlap(
    want_offset: Sequence[int], want_shape: Sequence[int], have_offset: Sequence[int], have_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two boxes as slices into the stored box and into the wanted box; None if there is none."""
    theirs, ours = [], []
    for wo, ws, ho, hs in zip(want_offset, want_shape, have_offset, have_shape, strict=True):
        start, stop = max(wo, ho), min(wo + ws, ho + hs)
        if start >= stop:
            return None
        theirs.append(slice(start - ho, stop - ho))
        ours.append(slice(start - wo, stop - wo))
    return tuple(theirs), tuple(ours)


def check_disjoint(key: str, pieces: Sequence[Piece], error: type[DaroError] = CheckpointError) -> None:
    """Raise an error if pieces overlap. Elements are only counted, so a piece that is stored twice would hide one that
    is missing."""
    for one, other in itertools.combinations(pieces, 2):
        if overlap(one.offset, one.shape, other.offset, other.shape) is not None:
            raise error(f"{key}: pieces at {one.offset} and {other.offset} overlap; the checkpoint is torn")
