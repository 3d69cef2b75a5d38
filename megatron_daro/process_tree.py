"""All processes that a process has started, directly or not: lists and kills them.

engine/sglang/watchdog.py has its own, since it runs under SGLang's interpreter, which may not have this package.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the process ids of all that a process started and that still live, parents first."""
    pids = [pid]
    for one in pids:
        try:
            texts = [(task / "children").read_text() for task in Path(f"/proc/{one}/task").iterdir()]
        except OSError:
            continue
        pids += [int(child) for text in texts for child in text.split()]
    return pids[1:]


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to each; ignore those that are gone."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
