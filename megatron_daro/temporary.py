"""Temporary directories that do not outlive their owner for long: what a killed process leaves, the next start removes.

Ray's session of a private cluster, and the sockets of Python's fork servers, are put here. A directory is removed only
with proof that it is ours and no longer used: its name, its user, and the lock on its `owner.lock`, which the kernel
releases when the owner ends, however it ends. A directory without that file stays.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import current_process
from pathlib import Path
from typing import IO

_PREFIX = "daro_"
_LOCK = "owner.lock"


@contextmanager
def own_directory(kind: str, base: str | None = None) -> Iterator[Path]:
    """Return a new directory, which is removed at the end of the block; first remove those of dead owners.

    Args:
        kind: part of its name, as in daro_KIND_1a2b3c. base: where it is made. Unset: the temporary directory.

    Raises:
        OSError: there is no place to write.
    """
    place = Path(base or tempfile.gettempdir())
    _remove_leftovers(place)
    directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}_", dir=place))
    try:
        with (directory / f"{_LOCK}.new").open("w") as lock:
            with suppress(OSError):  # a file system without locks: then nothing proves that the owner is dead
                fcntl.flock(lock, fcntl.LOCK_EX)
                (directory / f"{_LOCK}.new").rename(directory / _LOCK)  # under this name it was never unlocked
            yield directory
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """Remove a directory, trying for two seconds, since processes that are ending may still write there; the next start
    removes what is left, if `owner.lock` is."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


def directory_until_exit(kind: str) -> Path:
    """Return a new directory, as `own_directory` makes it, which is removed when this process ends."""
    until_exit = ExitStack()
    directory = until_exit.enter_context(own_directory(kind))
    atexit.register(until_exit.close)
    return directory


def use_own_sockets() -> None:
    """Let Python's multiprocessing put its sockets (pymp-*) into a directory of ours, until this process ends."""
    config = current_process()._config  # type: ignore[attr-defined]  # where multiprocessing.util.get_temp_dir looks
    if config.get("tempdir") is None:
        with suppress(OSError):  # if there is no place to write, multiprocessing itself says so
            config["tempdir"] = str(directory_until_exit("pymp"))


def _remove_leftovers(place: Path) -> None:
    in_use = None
    for directory in place.glob(f"{_PREFIX}*_*"):
        try:
            with (directory / _LOCK).open("r+") as lock:
                if not _is_ours(directory, lock):
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                in_use = _command_lines() if in_use is None else in_use
                if not any(os.fsencode(directory) in line for line in in_use):
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # no lock file, a living owner, or somebody was faster
            continue


def _is_ours(directory: Path, lock: IO[str]) -> bool:
    """Whether directory and lock belong to this user and are what they seem: other users may write to the temporary
    directory too."""
    folder, file = directory.lstat(), os.fstat(lock.fileno())
    listed = (directory / _LOCK).lstat()
    same = (file.st_dev, file.st_ino) == (listed.st_dev, listed.st_ino)
    return same and not directory.is_symlink() and folder.st_uid == file.st_uid == os.getuid()


def _command_lines() -> list[bytes]:
    """Return the command lines of all processes: a child of a dead owner may still work in its directory."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes())
    return lines
