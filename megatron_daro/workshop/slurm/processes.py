"""Processes that a node starts: each ends with everything it has started, and with the node's own program.

Their output is passed on, and its last lines are kept. A process whose parent is killed gets SIGKILL from the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 200


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child whose output is passed on to this process's, its last lines kept."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self.lines: list[str] = []
        self._saw: dict[bytes, asyncio.Event] = {}
        self._reader = asyncio.create_task(self._pass_on())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        """Start a command; standard error goes where standard output goes."""
        child = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        return cls(child)

    @property
    def last_line(self) -> str:
        """The last line with words that it printed."""
        return next((line for line in reversed(self.lines) if line.strip()), "")

    async def says(self, text: bytes) -> None:
        """Wait without limit until a line with this text comes; return at once if one of the kept lines has it."""
        event = self._saw.setdefault(text, asyncio.Event())
        if any(text.decode() in line for line in self.lines):
            event.set()
        await event.wait()

    async def wait(self) -> int:
        """Return the exit code once it has ended and all it printed was passed on."""
        code = await self._child.wait()
        with suppress(TimeoutError):  # a grandchild may hold the pipe open
            async with asyncio.timeout(5):
                await asyncio.shield(self._reader)
        return code

    async def kill(self) -> None:
        """Kill it with everything that it has started."""
        with suppress(psutil.NoSuchProcess):
            _kill_below(psutil.Process(self._child.pid))
        self.signal(signal.SIGKILL)
        await self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            self._child.send_signal(number)

    async def _pass_on(self) -> None:
        assert self._child.stdout
        async for raw in self._child.stdout:
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
            self.lines = [*self.lines[-_KEPT_LINES:], raw.decode(errors="replace").rstrip()]
            for text, event in self._saw.items():
                if text in raw:
                    event.set()


def kill_descendants() -> None:
    """Kill every process that this one has started, and their descendants."""
    _kill_below(psutil.Process())


def _kill_below(process: psutil.Process) -> None:
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
