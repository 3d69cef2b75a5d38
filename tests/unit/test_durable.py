"""What is forced to the disk, in which order, and with which content at that moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_daro import durable


@pytest.fixture
def forced(monkeypatch):
    """Paths that were synced, and the bytes that the kernel had of a file then."""
    synced, fsync = [], os.fsync

    def note(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path, None if path.is_dir() else path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(durable.os, "fsync", note)
    return synced


def num_open():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_folder_is_synced_after_its_files_and_nothing_stays_open(tmp_path, forced):
    for name in "bac":
        (tmp_path / name).write_text(name)
    before = num_open()
    durable.sync_folder(tmp_path)
    assert forced == [*((tmp_path / name, name.encode()) for name in "abc"), (tmp_path, None)]
    assert num_open() == before


@pytest.mark.parametrize(("content", "there"), [("Größe", "Größe".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_what_is_written_is_whole_before_it_is_synced(tmp_path, forced, content, there):
    (tmp_path / "file").write_text("longer than what comes now")
    durable.write(tmp_path / "file", content)
    assert forced == [(tmp_path / "file", there)]


def test_hashes_are_taken_once_from_all_folders_below(tmp_path):
    (tmp_path / "below").mkdir()
    files = [tmp_path / "a.safetensors", tmp_path / "below" / "b.sha256"]
    for number, path in enumerate(files):
        durable.write_hash(path, str(number) * 64)
    assert durable.take_hashes(tmp_path) == {path: str(number) * 64 for number, path in enumerate(files)}
    assert durable.take_hashes(tmp_path) == {}
