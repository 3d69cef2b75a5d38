"""Files written past the system's cache: the bytes that were given, wherever they begin, and errors of the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_daro.convert.safetensors_file import DirectFile

BUFFER = 8192
CONTENT = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()


def refuse_direct(monkeypatch):
    """As a file system that opens files for direct writes, and then takes none."""
    real = os.pwrite

    def pwrite(descriptor, data, at):
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)


def refuse_to_open_direct(monkeypatch):
    """As tmpfs does."""
    real = os.open

    def opened(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", opened)


def is_direct(descriptor):
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    flags = next(line.split()[1] for line in lines if line.startswith("flags"))
    return bool(int(flags, 8) & os.O_DIRECT)


@pytest.mark.parametrize("kind", ["direct", "refused when written", "refused when opened"])
@pytest.mark.parametrize("size", [0, 1, 4096, BUFFER - 1, BUFFER, 5 * BUFFER + 17])
def test_the_file_has_the_bytes_that_were_given(tmp_path, monkeypatch, kind, size):
    if kind == "refused when written":
        refuse_direct(monkeypatch)
    elif kind == "refused when opened":
        refuse_to_open_direct(monkeypatch)
    file, rng = DirectFile(tmp_path / "file", buffer_bytes=BUFFER), np.random.default_rng(size)
    at = 0
    while at < size:
        part = bytearray(CONTENT[at : min(size, at + int(rng.integers(1, 9000)))])
        assert (file.tell(), file.write(part)) == (at, len(part))
        at += len(part)
        part[:] = bytes(len(part))  # what was given may change
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == CONTENT[:size]


@pytest.mark.parametrize("cut", [1, 4095, 4096, 20_000, 50_001])
def test_parts_of_a_file_leave_each_other_alone_in_any_order(tmp_path, cut):
    parts = [(cut, 70_000), (0, cut), (70_000, len(CONTENT))]
    files = [DirectFile(tmp_path / "file", at=start, buffer_bytes=BUFFER) for start, _ in parts]
    for file, (start, stop) in zip(files, parts, strict=True):
        file.write(CONTENT[start:stop])
    for file in files:
        file.finish()
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_that_is_made_anew_has_nothing_of_the_old_one(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    file = DirectFile(tmp_path / "file")
    file.write(b"short")
    file.finish()
    assert (tmp_path / "file").read_bytes() == b"short"


def test_whole_blocks_go_past_the_cache_where_the_file_system_lets_them(tmp_path, monkeypatch):
    file, real, direct = DirectFile(tmp_path / "file", at=10, buffer_bytes=BUFFER), os.pwrite, []

    def pwrite(descriptor, data, at):
        count = real(descriptor, data, at)
        direct.append(count if is_direct(descriptor) else 0)
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    file.write(CONTENT)
    file.finish()
    if not any(direct):
        pytest.skip("this file system has no direct writes")
    assert sum(direct) == (len(CONTENT) + 10) // 4096 * 4096 - 4096
    assert (tmp_path / "file").read_bytes()[10:] == CONTENT


@pytest.mark.parametrize("size", [100, 10 * BUFFER])
def test_a_full_disk_is_its_error_and_the_file_is_closed(tmp_path, monkeypatch, size):
    file, opened = DirectFile(tmp_path / "file", buffer_bytes=BUFFER), len(list(Path("/proc/self/fd").iterdir()))

    def pwrite(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        try:
            file.write(CONTENT[:size])
            file.finish()
        finally:
            file.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < opened
