"""Boxes of tensors in files: which bytes they are, and reading any other box of the same tensor out of them.

Place in the data flow: an HF checkpoint and both formats of Megatron checkpoints are lists of `Piece`; a rank that
loads, the converter and its check ask for boxes. Only the bytes of a box are read, with plain reads and not through a
mapped file: mapped pages count as memory of the process, so that a conversion would seem to hold the whole model.
Refuses a box that the pieces do not cover.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_daro.errors import CheckpointError, DaroError

_MOST_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [offset, offset + shape) of a tensor of `global_shape`, row by row from byte `start` of a file."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    start: int


class PieceStore(ABC):
    """Tensors by key, each made of pieces.

    Attributes:
        bytes_read: of tensors, since it was made.
        error: what is raised where a file cannot be read.
    """

    error: type[DaroError] = CheckpointError

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: OrderedDict[Path, int] = OrderedDict()

    @abstractmethod
    def keys(self) -> list[str]:
        """Every key, sorted."""

    @abstractmethod
    def pieces(self, key: str) -> Sequence[Piece]:
        """Return the pieces of a tensor, at least one. Raises the store's error if there is none of this key."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.pieces(key)[0].global_shape

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of the tensor."""
        return self.pieces(key)[0].dtype

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the elements [offset, offset + shape).

        Args:
            key: of the tensor. offset, shape: of the box. out: filled and returned; of this shape, any dtype and
                device; straight from the file where it is a contiguous CPU tensor of the file's dtype. None: a new CPU
                tensor.

        Raises:
            DaroError: of the store's kind: no such tensor, pieces that do not cover the box or cover a part twice, or
                a file that cannot be read.
        """
        found = []
        for piece in self.pieces(key):
            both = overlap(offset, shape, piece.offset, piece.shape)
            if both is not None:
                found.append((piece, *both))
        check_disjoint(key, [piece for piece, _, _ in found], self.error)
        filled = sum(math.prod(s.stop - s.start for s in ours) for _, _, ours in found)
        if filled != math.prod(shape):
            where = self.pieces(key)[0].path.parent
            raise self.error(f"{key}: {filled} of {math.prod(shape)} elements are in {where}; it is incomplete")
        box = torch.empty(tuple(shape), dtype=self.dtype(key)) if out is None else out
        for piece, theirs, ours in found:
            self._read_window(piece, theirs, box[ours])
        return box

    def close(self) -> None:
        """Let go of the files; they are opened again when needed."""
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
    """Where a window of a row-major array lies, as few runs as possible.

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
    """Return the bytes of a contiguous CPU tensor, to be filled while it lives. Not by way of numpy: torch would never
    again change the size of a storage that numpy has seen, and weights give their memory away and take it back."""
    memory = (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())
    return memoryview(memory).cast("B")


def overlap(
    want_offset: Sequence[int], want_shape: Sequence[int], have_offset: Sequence[int], have_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the common box as slices into what is stored and into what is wanted; None if there is none."""
    theirs, ours = [], []
    for wo, ws, ho, hs in zip(want_offset, want_shape, have_offset, have_shape, strict=True):
        start, stop = max(wo, ho), min(wo + ws, ho + hs)
        if start >= stop:
            return None
        theirs.append(slice(start - ho, stop - ho))
        ours.append(slice(start - wo, stop - wo))
    return tuple(theirs), tuple(ours)


def check_disjoint(key: str, pieces: Sequence[Piece], error: type[DaroError] = CheckpointError) -> None:
    """Elements are counted, not marked: a piece stored twice would stand for one that is missing."""
    for one, other in itertools.combinations(pieces, 2):
        if overlap(one.offset, one.shape, other.offset, other.shape) is not None:
            raise error(f"{key}: pieces at {one.offset} and {other.offset} overlap; the checkpoint is torn")
