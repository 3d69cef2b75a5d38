"""Boxes of tensors in files: where their bytes lie, and how any other box of the same tensor is read from them.

An HF checkpoint and both Megatron formats are lists of `Piece`; a rank that loads, the converter and its verification
ask for boxes. `shard_runs` says which rows and columns of which HF tensors make up what one tensor-parallel rank
holds, `hf_runs` is the inverse; the layouts themselves are known to convert/mapping.py alone. Only the bytes of a box
are read, by plain reads: pages of a mapped file count as memory of the process, and a conversion would seem to hold
the whole model. Rejects a box that the pieces do not cover.
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

from megatron_daro.config.model_files import QUANTIZED
from megatron_daro.convert.mapping import TensorRule
from megatron_daro.errors import CheckpointError, DaroError, ModelError

PADDING = -1


class RowReader(Protocol):
    """HF tensors by name, of which any rows and columns can be read: an HFCheckpoint, or MegatronWeights."""

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return its shape."""

    def dtype(self, name: str) -> torch.dtype:
        """Return its dtype."""

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return rows [start, stop), of these columns (None: all); with `out`, fill and return that tensor."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of HF tensor number `source` of a rule; `source` PADDING: rows of zeros.

    `at` is the first row of the Megatron parameter that they are; `columns` the columns that are taken, None: all.
    """

    source: int
    start: int
    stop: int
    at: int
    columns: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def shard_runs(rule: TensorRule, tp_rank: int, tp_size: int, *, padded_vocab: int | None = None) -> list[Run]:
    """Return the rows of a rank's shard, first to last, as runs of rows of HF tensors.

    Args:
        rule: of the parameter. tp_rank, tp_size: 0 <= tp_rank < tp_size. padded_vocab: as in `mapping.shard`.

    Raises:
        ModelError: the parameter cannot be divided by tp_size.
    """
    pieces = rule.pieces(tp_rank, tp_size, padded_vocab=padded_vocab)
    rows = rule.local_shape(tp_size, padded_vocab=padded_vocab)[0]
    if rule.dim == 1:
        return [Run(p.source, 0, rows, 0, (p.start, p.stop) if tp_size > 1 else None) for p in pieces]
    runs, at = [], 0
    for piece in pieces:
        runs.append(Run(piece.source, piece.start, piece.stop, at))
        at += runs[-1].rows
    return runs if at == rows else [*runs, Run(PADDING, 0, rows - at, at)]


def read_shard(
    rule: TensorRule,
    tensors: RowReader,
    tp_rank: int,
    tp_size: int,
    *,
    padded_vocab: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return what `mapping.shard` gives, but read no byte that another rank's shard holds.

    With `out`, that tensor is filled and returned: without another copy where it is contiguous, on the CPU and of the
    dtype of the files.

    Raises:
        ModelError: a tensor is missing, has the wrong shape or another dtype than its neighbours; or it is torn.
    """
    dtype = common_dtype(rule, tensors)
    shape = rule.local_shape(tp_size, padded_vocab=padded_vocab)
    values = torch.empty(shape, dtype=dtype) if out is None else out.view(shape)
    for run in shard_runs(rule, tp_rank, tp_size, padded_vocab=padded_vocab):
        target = values[run.at : run.at + run.rows]
        if run.source == PADDING:
            target.zero_()
        else:
            tensors.read(rule.hf_names[run.source], run.start, run.stop, run.columns, out=target)
    return values


def source_dtypes(rule: TensorRule, tensors: RowReader) -> tuple[torch.dtype, ...]:
    """Return the dtype of each of a rule's HF tensors. Raises ModelError: one is missing, or has the wrong shape."""
    for name, dims in zip(rule.hf_names, rule.hf_shapes, strict=True):
        if name not in tensors:
            raise ModelError(f"{name}, which {rule.megatron_name} is made of, is missing from the checkpoint.")
        if tensors.shape(name) != dims:
            raise ModelError(f"{name} has shape {tensors.shape(name)}; config.json of the model asks for {dims}.")
        dtype = tensors.dtype(name)
        if not dtype.is_floating_point or dtype.itemsize < 2:  # a cast would leave out the scales
            raise ModelError(f"{name} is {dtype}; allowed: fp32, bf16, fp16. {QUANTIZED}")
    return tuple(tensors.dtype(name) for name in rule.hf_names)


def common_dtype(rule: TensorRule, tensors: RowReader) -> torch.dtype:
    """Return the one dtype of a rule's HF tensors. Raises ModelError: as `source_dtypes`, or they have several."""
    dtypes = source_dtypes(rule, tensors)
    if len(set(dtypes)) > 1:
        own = ", ".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in zip(rule.hf_names, dtypes, strict=True))
        raise ModelError(
            f"{rule.megatron_name} is made of tensors of different dtypes: {own}. Make them one with "
            "`megatron-daro convert --dtype`"
        )
    return dtypes[0]


def hf_runs(rule: TensorRule, *, padded_vocab: int | None = None) -> list[list[Run]]:
    """Return for each HF tensor of a rule the runs of the whole parameter that make it up, in the HF tensor's order."""
    runs_of_source: list[list[Run]] = [[] for _ in rule.hf_names]
    for run in shard_runs(rule, 0, 1, padded_vocab=padded_vocab):
        if run.source != PADDING:
            runs_of_source[run.source].append(run)
    return [sorted(runs, key=lambda run: run.start) for runs in runs_of_source]


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


class Box(Protocol):
    """Elements [offset, offset + shape) of a tensor."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Return the first element along each axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of elements along each axis."""


B = TypeVar("B", bound=Box)


class BoxIndex(Generic[B]):
    """The stored boxes of one tensor, looked up by place: a tensor of all experts of all layers has thousands.

    Along each axis in turn, boxes that begin at the same element are one group, and groups are sorted.

    Args:
        boxes: of as many axes each. axis: the first one to look at.
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
        """Yield every box that shares elements with [offset, offset + shape), and few others."""
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
        bytes_read: of tensors, since it was made.
        error: what is raised where a file cannot be read.
    """

    error: type[DaroError] = CheckpointError

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._indexes: dict[str, BoxIndex[Any]] = {}

    @abstractmethod
    def keys(self) -> list[str]:
        """Every key, sorted."""

    @abstractmethod
    def boxes(self, key: str) -> Sequence[Box]:
        """Return the stored boxes of a tensor, at least one. Raises the store's error if there is none of this key."""

    @abstractmethod
    def piece(self, key: str, box: Any) -> Piece:
        """Return where the bytes of one of `boxes` are. Raises the store's error where its file is torn."""

    @abstractmethod
    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of the tensor."""
        return self.piece(key, self.boxes(key)[0]).dtype

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
