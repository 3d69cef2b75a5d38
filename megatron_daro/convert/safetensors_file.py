"""Writing a safetensors file part by part; config/safetensors_header.py reads the header of one.

The safetensors package only writes tensors that are all in memory, which is impossible for a model larger than the
memory.

Large files are written past the system's page cache (`DirectFile`, which also writes `torch_dist` files): a write
through the cache costs a core's time for each page, and fills the memory with pages that nobody reads again. Bytes are
copied into one of two aligned buffers, and a thread writes one while the other is filled. If the file system does not
support such writes (tmpfs, some network file systems), the same bytes go through the cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from megatron_daro.errors import ModelError

BUFFER_BYTES = 16 * 2**20
_BLOCK_BYTES = 4096  # a direct write begins and ends at multiples of it, in memory and in the file


class DirectFile:
    """A file that is written in order. The caller may change the bytes once `write` has returned; after `finish` they
    are on disk.

    Args:
        path: of the file. at: position of the first byte; the rest of the file is kept, so that several processes may
            write parts of one file. None: begin a new file.
        buffer_bytes: size of each of the two buffers, a multiple of 4096.

    Raises:
        OSError: the disk refused; also from `write` and `finish`.
    """

    def __init__(self, path: Path, *, at: int | None = None, buffer_bytes: int = BUFFER_BYTES) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        self._cached: int | None = os.open(path, flags if at is not None else flags | os.O_TRUNC, 0o666)
        self._direct = _open_direct(path)
        self._buffers = [np.frombuffer(mmap.mmap(-1, buffer_bytes), np.uint8) for _ in range(2)]
        self._base, self._first = divmod(at or 0, _BLOCK_BYTES)  # the buffer's place in the file, and its first byte
        self._base *= _BLOCK_BYTES
        self._last = self._first
        self._thread = ThreadPoolExecutor(1, "file writer")
        self._writing: Future[None] | None = None

    def tell(self) -> int:
        """Return the position of the next byte in the file."""
        return self._base + self._last

    def write(self, data: bytes | memoryview) -> int:
        """Take the next bytes, a contiguous buffer. Returns their number."""
        bytes_B = np.frombuffer(data, np.uint8)
        at = 0
        while at < len(bytes_B):
            buffer = self._buffers[0]
            count = min(len(bytes_B) - at, len(buffer) - self._last)
            np.copyto(buffer[self._last : self._last + count], bytes_B[at : at + count])
            at, self._last = at + count, self._last + count
            if self._last == len(buffer):
                self._hand_over()
        return len(bytes_B)

    def flush(self) -> None:
        """Do nothing. torch.save calls this; `finish` writes the bytes to the disk."""

    def finish(self) -> None:
        """Write the remaining bytes and close the file. Everything is on disk when this returns."""
        try:
            self._wait()
            self._put(self._buffers[0], self._base, self._first, self._last)
            os.fsync(self._open_file())
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is. Does nothing if it is closed."""
        self._thread.shutdown()
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)
        self._cached = self._direct = None

    def _hand_over(self) -> None:
        self._wait()
        self._writing = self._thread.submit(self._put, self._buffers[0], self._base, self._first, self._last)
        self._base, self._first, self._last = self._base + len(self._buffers[0]), 0, 0
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _put(self, buffer: np.ndarray, base: int, first: int, last: int) -> None:
        """Write buffer[first:last] to byte base + first of the file; whole blocks directly."""
        start = min(-(-first // _BLOCK_BYTES) * _BLOCK_BYTES, last)
        stop = max(last // _BLOCK_BYTES * _BLOCK_BYTES, start)
        self._put_cached(buffer.data[first:start], base + first)
        done = self._put_direct(buffer.data[start:stop], base + start)
        self._put_cached(buffer.data[start + done : last], base + start + done)

    def _put_direct(self, data: memoryview, at: int) -> int:
        """Write whole blocks past the cache. Returns how many bytes the file system accepted."""
        done = 0
        while self._direct is not None and done < len(data) and done % _BLOCK_BYTES == 0:
            try:
                done += os.pwrite(self._direct, data[done:], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = None
        return done

    def _put_cached(self, data: memoryview, at: int) -> None:
        while data:
            count = os.pwrite(self._open_file(), data, at)
            data, at = data[count:], at + count

    def _open_file(self) -> int:
        if self._cached is None:
            raise ValueError("the file is closed")
        return self._cached


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        return None


_ALIGNMENT = 8
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileWriter:
    """Writes a safetensors file front to back; tensors are passed to `write` in order, whole or in parts.

    The file is on disk when the `with` block ends; `sha256` is then the hash of all its bytes, computed while they were
    written. If the block fails, the file is left as it is: the caller owns the folder and removes it. A tensor may
    change once `write` has returned.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
        hashed: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        """Write the header.

        Args:
            path: of the file, which is created or overwritten. tensors: (name, dtype, shape) of all tensors of the
                file, in order.
            metadata: texts for the header. hashed: whether to compute the hash of the whole file.
            part: (first tensor to write, last one plus 1), as numbers; the rest of the file is written by others,
                perhaps other processes; the part with tensor 0 writes the header. None: all tensors.

        Raises:
            OSError: the disk refused.
        """
        self._path = path
        self._hash = hashlib.sha256() if hashed else None
        header, starts = _header(tensors, metadata)
        first, last = part or (0, len(starts) - 1)
        self._left = starts[last] - starts[first]
        self._file = DirectFile(path, at=len(header) + starts[first] if first else (None if part is None else 0))
        if first == 0:
            self._put(memoryview(header))

    @property
    def sha256(self) -> str | None:
        """Hash of the written bytes, hexadecimal; None unless `hashed`."""
        return self._hash.hexdigest() if self._hash else None

    def write(self, values: Tensor) -> None:
        """Append the bytes of a tensor, or of the next rows of one."""
        data = bytes_of(values)
        self._left -= len(data)
        self._put(data)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and self._left == 0:
            self._file.finish()
            return
        self._file.close()
        if kind is None:
            raise ModelError(f"{self._path}: {abs(self._left)} bytes too {'few' if self._left > 0 else 'many'} came")

    def _put(self, data: memoryview) -> None:
        for start in range(0, len(data), BUFFER_BYTES):  # in parts, so that hashing and writing overlap
            part = data[start : start + BUFFER_BYTES]
            if self._hash:
                self._hash.update(part)
            self._file.write(part)


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype. Raises ModelError if it has none."""
    if dtype not in _NAMES:
        raise ModelError(f"safetensors has no name for {dtype}; allowed: {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def _header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[int]]:
    """Return the header, and the position in the data at which each tensor begins, followed by the end of the last."""
    rows: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts = [0]
    for name, dtype, shape in tensors:
        stop = starts[-1] + math.prod(shape) * dtype.itemsize
        if name in rows:
            raise ModelError(f"tensor {name} came twice; a checkpoint holds each name once.")
        rows[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [starts[-1], stop]}
        starts.append(stop)
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, starts
