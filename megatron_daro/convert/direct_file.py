"""Writing large files past the system's cache: from a byte on, front to back, while the next bytes are made.

`FileWriter` and the files of `torch_dist`, so conversions and training's checkpoints. A write
through the cache costs a core's time for each page, and fills the memory with pages that nobody reads again. Here bytes
are copied into one of two aligned buffers, and a thread writes one while the other is filled. Where the file system has
no such writes (tmpfs, some network file systems), the same bytes go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

BUFFER_BYTES = 16 * 2**20
_BLOCK_BYTES = 4096  # a direct write begins and ends at multiples of it, in memory and in the file


class DirectFile:
    """A file that is written in order. Bytes may change once `write` returned; `finish` brings them to the disk.

    Args:
        path: of the file. at: where the first byte goes; None: at the beginning of a file that is made anew. With a
            number, what the file has elsewhere stays: several processes may write parts of one file.
        buffer_bytes: of each of the two buffers, a multiple of 4096.

    Raises:
        OSError: the disk refused; also from `write` and `finish`.
    """

    def __init__(self, path: Path, *, at: int | None = None, buffer_bytes: int = BUFFER_BYTES) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        self._cached: int | None = os.open(path, flags if at is not None else flags | os.O_TRUNC, 0o666)
        self._direct = _open_direct(path)
        self._buffers = [np.frombuffer(mmap.mmap(-1, buffer_bytes), np.uint8) for _ in range(2)]
        self._base, self._first = divmod(at or 0, _BLOCK_BYTES)  # the buffer's place, and where it begins to be filled
        self._base *= _BLOCK_BYTES
        self._last = self._first
        self._thread = ThreadPoolExecutor(1, "file writer")
        self._writing: Future[None] | None = None

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._base + self._last

    def write(self, data: bytes | memoryview) -> int:
        """Take the next bytes, a contiguous buffer; returns their number."""
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
        """Do nothing: torch.save calls this; `finish` brings the bytes to the disk."""

    def finish(self) -> None:
        """Write what is left; everything is on the disk when this returns, and the file is closed."""
        try:
            self._wait()
            self._put(self._buffers[0], self._base, self._first, self._last)
            os.fsync(self._open_file())
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is; nothing happens where it is closed."""
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
        """Write whole blocks; returns how many bytes the file system took so."""
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
