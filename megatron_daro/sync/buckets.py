"""Packing a stream of tensors into byte buckets, and reading them back without copying.

Place in the data flow: actor export -> (HF name, tensor) stream -> `bucketize` -> transport -> `unbucket` -> engine.
A bucket is a copy: the stream may reuse its memory as soon as the next item is asked for. Holds one bucket and the
tensor being packed. Knows nothing of models or transports.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_daro.errors import SyncError
from megatron_daro.types import WeightBucket

# A view in another dtype needs an offset that is a multiple of its item size; 64 also keeps whole cache lines.
_ALIGN_BYTES = 64
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def bucketize(stream: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Whole tensors, in order, in buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Args:
        stream: (name, tensor of a float dtype, any shape, any device).
        bucket_bytes: limit of a bucket's data in bytes, at least 1. Tensors begin at multiples of 64 bytes.

    Returns:
        Buckets that own their data. An empty stream gives none.

    Raises:
        SyncError: bucket_bytes below 1, or a dtype that cannot be transported.
    """
    if bucket_bytes < 1:
        raise SyncError(f"bucket_bytes must be at least 1, got {bucket_bytes}.")
    bucket = _OpenBucket(bucket_bytes)
    for name, tensor in stream:
        if bucket.entries and not bucket.fits(tensor.nbytes):
            yield bucket.close()
            bucket = _OpenBucket(bucket_bytes)
        bucket.add(name, tensor)
    if bucket.entries:
        yield bucket.close()


@dataclass(frozen=True, slots=True, eq=False)
class FlatBucket:
    """Whole tensors of one dtype end to end, as SGLang's `flattened_bucket` has them: no padding.

    names, shapes: of each tensor in order. dtype: such as "bfloat16". data: uint8 [bytes], on the tensors' device.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    data: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the data)."""
        start, dtype = 0, _DTYPES[self.dtype]
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            yield name, self.data[start:end].view(dtype).view(shape)
            start = end


def flatten(stream: Iterable[tuple[str, Tensor]], bucket_bytes: int, *, reuse: bool = False) -> Iterator[FlatBucket]:
    """Whole tensors, in order, in packed buckets of one dtype and at most `bucket_bytes`; a larger tensor has its own.

    Args:
        stream: (name, tensor of a float dtype, any shape, any device). A larger tensor is not copied: the stream must
            leave it as it is for as long as the bucket is in use.
        bucket_bytes: limit of a bucket's data in bytes, at least 1.
        reuse: the buckets take turns in two buffers, which saves the time in which the system clears new pages: when
            a bucket is asked for, the data of the one before the last is overwritten. Else each has its own.

    Returns:
        Buckets, whose data lies on the device of their tensors.

    Raises:
        SyncError: bucket_bytes below 1, or a dtype that cannot be transported.
    """
    if bucket_bytes < 1:
        raise SyncError(f"bucket_bytes must be at least 1, got {bucket_bytes}.")
    buffers = _Buffers(bucket_bytes, 2 if reuse else 0)
    data, used, held = torch.empty(0, dtype=torch.uint8), 0, list[tuple[str, tuple[int, ...]]]()
    dtype_name = ""
    for name, tensor in stream:
        tensor_dtype, bytes_B = _dtype_name(name, tensor), tensor_bytes(tensor)
        if held and (tensor_dtype != dtype_name or used + len(bytes_B) > bucket_bytes):
            yield _flat(held, dtype_name, data[:used])
            held = []
        if len(bytes_B) > bucket_bytes:
            yield _flat([(name, tuple(tensor.shape))], tensor_dtype, bytes_B)
            continue
        if not held:
            data, used, dtype_name = buffers.take(tensor.device), 0, tensor_dtype
        data[used : used + len(bytes_B)].copy_(bytes_B)
        used += len(bytes_B)
        held.append((name, tuple(tensor.shape)))
    if held:
        yield _flat(held, dtype_name, data[:used])


class _Buffers:
    """A fixed number of buffers that are handed out in turn; with none, new ones."""

    def __init__(self, num_bytes: int, count: int) -> None:
        self._num_bytes = num_bytes
        self._held: deque[Tensor | None] = deque([None] * count, maxlen=count)

    def take(self, device: torch.device) -> Tensor:
        """The oldest buffer."""
        held = self._held.popleft() if self._held else None
        if held is None or held.device != device:
            held = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._held.append(held)  # with none to hold, this does nothing
        return held


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes] on the tensor's device: the same memory, unless the tensor is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _flat(held: list[tuple[str, tuple[int, ...]]], dtype_name: str, data: Tensor) -> FlatBucket:
    return FlatBucket(tuple(name for name, _ in held), tuple(shape for _, shape in held), dtype_name, data)


def unbucket(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its data: read them, or copy them, before the data is reused.

    Args:
        bucket: as `bucketize` made it; its data may be read-only (then the views must not be written to).

    Returns:
        (name, CPU tensor sharing memory with bucket.data).

    Raises:
        SyncError: an entry does not fit the data, or names an unknown dtype.
    """
    data = bucket.data
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise SyncError(f"bucket data must be contiguous uint8 of one dimension, got {data.dtype} {data.shape}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        bytes_B = torch.from_numpy(data)
    for name, shape, dtype_name, offset in bucket.entries:
        if dtype_name not in _DTYPES:
            raise SyncError(f"{name}: dtype {dtype_name!r} in a bucket; allowed: {', '.join(_DTYPES)}.")
        dtype = _DTYPES[dtype_name]
        end = offset + math.prod(shape) * dtype.itemsize
        if offset < 0 or min(shape, default=0) < 0 or end > len(data) or offset % dtype.itemsize:
            raise SyncError(f"{name}: bytes {offset}..{end} do not fit a bucket of {len(data)} bytes; it is torn.")
        yield name, bytes_B[offset:end].view(dtype).view(shape)


class _OpenBucket:
    """A bucket being filled. Its memory is reserved whole at first use: the system only backs the pages written to."""

    def __init__(self, bucket_bytes: int) -> None:
        self.entries: list[tuple[str, tuple[int, ...], str, int]] = []
        self._limit = bucket_bytes
        self._used = 0
        self._data = np.empty(0, dtype=np.uint8)

    def fits(self, nbytes: int) -> bool:
        """Whether a tensor of that size stays within the limit."""
        return _aligned(self._used) + nbytes <= self._limit

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor to the end. The first one may exceed the limit."""
        dtype_name = _dtype_name(name, tensor)
        if not self.entries:
            self._data = np.empty(max(self._limit, tensor.nbytes), dtype=np.uint8)
        start = _aligned(self._used)
        self._data[self._used : start] = 0
        end = start + tensor.nbytes
        torch.from_numpy(self._data[start:end]).copy_(tensor_bytes(tensor))
        self.entries.append((name, tuple(tensor.shape), dtype_name, start))
        self._used = end

    def close(self) -> WeightBucket:
        """The finished bucket."""
        return WeightBucket(entries=tuple(self.entries), data=self._data[: self._used])


def _dtype_name(name: str, tensor: Tensor) -> str:
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    if dtype_name not in _DTYPES:
        raise SyncError(f"{name}: dtype {dtype_name} cannot be transported; allowed: {', '.join(_DTYPES)}.")
    return dtype_name


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES
