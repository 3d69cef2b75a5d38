"""Says where a driver stands: on SIGUSR2 the stacks of its threads and of its asyncio tasks go to its stderr.

Tests that start a driver of their own call `install` in it; `cli_runs.Run.finish` asks one that does not end.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from types import FrameType


def install() -> None:
    """From now on. The threads are told even where the main one is in C code; the tasks where it runs Python."""
    signal.signal(signal.SIGUSR2, _tell_tasks)
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)


def _tell_tasks(number: int, frame: FrameType | None) -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs
        print("no event loop is running", file=sys.stderr, flush=True)
        return
    for task in tasks:
        print(task, file=sys.stderr)
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
