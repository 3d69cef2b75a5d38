"""Packing a stream of tensors into buckets of bytes, and reading them back without copying.

Actor export -> (HF name, tensor) stream -> `bucketize` -> transport -> `WeightBucket.tensors`.
The layout is that of SGLang's `flattened_bucket`, and the same for every receiver. Knows nothing of transports, and of
models only which tensors must stay in one bucket.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_daro.errors import SyncError
from megatron_daro.families import families
from megatron_daro.sync.fp8_cast import pattern_of

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
}


@dataclass(frozen=True, slots=True, eq=False)
class WeightBucket:
    """Whole tensors of one dtype, one after the other without padding: the unit of weight transport.

    names, shapes: of the tensors in order, HF names. dtype: such as "bfloat16". data: uint8 [bytes], on the tensors'
    device. When a bucket is pickled, its bytes travel out of band (protocol 5) and arrive in host memory, maybe
    read-only.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    data: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view of the data), to be read or copied before the data is reused.

        Raises:
            SyncError: the shapes do not make up the data, or the dtype is unknown.
        """
        if self.dtype not in _DTYPES:
            raise SyncError(f"dtype {self.dtype!r} in a bucket; allowed: {', '.join(_DTYPES)}.")
        start, dtype = 0, _DTYPES[self.dtype]
        expected = sum(math.prod(shape) for shape in self.shapes) * dtype.itemsize
        if len(self.names) != len(self.shapes) or expected != len(self.data):
            raise SyncError(
                f"a bucket of {len(self.names)} names and {len(self.data)} bytes has {len(self.shapes)} shapes of "
                f"{expected} bytes; it is torn."
            )
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            yield name, self.data[start:end].view(dtype).view(shape)
            start = end

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.names, self.shapes, self.dtype, self.data.cpu().numpy())


def _received(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], dtype: str, bytes_B: np.ndarray
) -> WeightBucket:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return WeightBucket(names, shapes, dtype, torch.from_numpy(bytes_B))


def bucketize(
    stream: Iterable[tuple[str, Tensor]], bucket_bytes: int, *, reuse: bool = False, copy_all: bool = False
) -> Iterator[WeightBucket]:
    """Pack whole tensors, in order, into buckets of one dtype and at most `bucket_bytes`; a larger tensor gets a bucket
    of its own. Tensors that a server takes only in one call (`Family.loaded_together`) count as one.

    Args:
        stream: (HF name, tensor of a float dtype, any shape, any device). A tensor above the limit is not copied: the
            stream must not change it while its bucket is in use.
        bucket_bytes: limit of a bucket's data in bytes, at least 1.
        reuse: buckets use two buffers in turn, which saves the system the time to clear new pages: when a bucket is
            requested, the data of the second to last one is overwritten. If not set, each bucket has its own buffer.
        copy_all: copy tensors above the limit too, so that no bucket shares a tensor's storage.

    Yields:
        Buckets, whose data lies on the device of their tensors.

    Raises:
        SyncError: bucket_bytes below 1, or a dtype that cannot be transported.
    """
    if bucket_bytes < 1:
        raise SyncError(f"bucket_bytes must be at least 1, got {bucket_bytes}.")
    buffers = _Buffers(bucket_bytes, 2 if reuse else 0)
    data, used, held = torch.empty(0, dtype=torch.uint8), 0, list[tuple[str, tuple[int, ...]]]()
    dtype_name = ""
    for named in _together(stream):
        unit_dtype = _dtype_name(*named[0])
        unit, parts = [(name, tuple(tensor.shape)) for name, tensor in named], [tensor_bytes(t) for _, t in named]
        size = sum(map(len, parts))
        if held and (unit_dtype != dtype_name or used + size > bucket_bytes):
            yield _bucket(held, dtype_name, data[:used])
            held = []
        if size > bucket_bytes:
            whole = torch.cat(parts) if len(parts) > 1 or copy_all else parts[0]
            yield _bucket(unit, unit_dtype, whole)
            continue
        if not held:
            data, used, dtype_name = buffers.take(parts[0].device), 0, unit_dtype
        for bytes_B in parts:
            data[used : used + len(bytes_B)].copy_(bytes_B)
            used += len(bytes_B)
        held += unit
    if held:
        yield _bucket(held, dtype_name, data[:used])


def _together(stream: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in lists: those that must stay in one bucket together, others alone."""
    with_next = _with_next()
    unit: list[tuple[str, Tensor]] = []
    for name, tensor in stream:
        unit.append((name, tensor))
        if not with_next.fullmatch(name):
            yield unit
            unit = []
    if unit:
        yield unit


@cache
def _with_next() -> re.Pattern[str]:
    """Return the pattern for names of tensors that must be in one bucket with the next tensor of the stream."""
    tables = families().values()
    return pattern_of(name for one in tables for role in one.loaded_together[:-1] for name in one.tensors[role])


class _Buffers:
    """A fixed number of buffers that are handed out in turn; with `count` 0, always new ones."""

    def __init__(self, num_bytes: int, count: int) -> None:
        self._num_bytes = num_bytes
        self._held: deque[Tensor | None] = deque([None] * count, maxlen=count)

    def take(self, device: torch.device) -> Tensor:
        """Return the buffer that was handed out longest ago, or a new one if there is none on this device."""
        held = self._held.popleft() if self._held else None
        if held is None or held.device != device:
            held = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._held.append(held)  # does nothing with `count` 0
        return held


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return uint8 [bytes] on the tensor's device: the same memory if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _bucket(held: list[tuple[str, tuple[int, ...]]], dtype_name: str, data: Tensor) -> WeightBucket:
    return WeightBucket(tuple(name for name, _ in held), tuple(shape for _, shape in held), dtype_name, data)


def _dtype_name(name: str, tensor: Tensor) -> str:
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    if dtype_name not in _DTYPES:
        raise SyncError(f"{name}: dtype {dtype_name} cannot be transported; allowed: {', '.join(_DTYPES)}.")
    return dtype_name
