"""Whether a file that a user names can be opened at all: data, dumps, and files of a checkpoint."""

from __future__ import annotations

import stat
from pathlib import Path


def why_no_file(path: Path) -> str:
    """Return why a path cannot be read as a file, without opening it; empty if it can.

    Reading a pipe or a device may never end; the same holds for files of the kernel, which have size 0.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "is not a file"
    return "" if found.st_size else "is an empty file"
