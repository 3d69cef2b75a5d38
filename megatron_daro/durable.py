"""Files and names that survive a crash of the machine: fsync of a file, of a folder, of all that a folder holds.

Checkpoints, rollouts, metrics and exported weights are forced to the disk by these before anything states that they
exist. A rename is durable once the folder that holds the name was synced.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's content, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(directory: Path) -> None:
    """Force the files of a folder, and then its names, to the disk. Raises OSError."""
    for path in sorted(directory.iterdir()):
        sync(path)
    sync(directory)


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file (text as UTF-8); it is on the disk when this returns. Raises OSError."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, over the one that is there; on the disk when this returns. Raises OSError."""
    beside = path.with_name(f"{path.name}.tmp")
    write(beside, content)
    beside.replace(path)
    sync(path.parent)


_HASH_SUFFIX = ".sha256"


def write_hash(path: Path, sha256: str) -> None:
    """Leave the SHA-256 of a file, taken while it was written, for `take_hashes` of the same folder. Raises OSError."""
    path.with_name(path.name + _HASH_SUFFIX).write_text(sha256)


def take_hashes(directory: Path) -> dict[Path, str]:
    """Return what `write_hash` left in a folder and below, by file, and remove it. Raises OSError."""
    digests = {}
    for note in directory.rglob(f"*{_HASH_SUFFIX}"):
        digests[note.with_name(note.name.removesuffix(_HASH_SUFFIX))] = note.read_text()
        note.unlink()
    return digests
