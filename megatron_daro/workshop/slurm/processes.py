"""The processes that a node of a job starts: Ray's, and the training. Each ends with everything it has started.

Node.py owns them. A process whose parent is killed gets SIGKILL from the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_daro.errors import WorkerError

_PR_SET_PDEATHSIG = 1
_RAY_STARTED = b"Ray runtime started"
_PORT_TAKEN = "The specified port is"
"""Of Ray's words where another program has the port of its control service."""
_KEPT_LINES = 200
RAY_START_S = 150.0


class SlowStartError(WorkerError):
    """A start took longer than it may."""


class PortTakenError(WorkerError):
    """Another program took the port in the moment between its choice and its use."""


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
        """Wait until a line with this text comes, unless one of the last lines has it; for ever, if none does."""
        event = self._saw.setdefault(text, asyncio.Event())
        if any(text.decode() in line for line in self.lines):
            event.set()
        await event.wait()

    async def wait(self) -> int:
        """Return the exit code once it has ended and all it printed was passed on."""
        code = await self._child.wait()
        with suppress(TimeoutError):  # a grandchild may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._reader), 5)
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
    """Kill everything that this process has started, theirs included."""
    _kill_below(psutil.Process())


def _kill_below(process: psutil.Process) -> None:
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


async def start_ray(
    *, head: bool, address: str, port: int, gpus: int, cpus: int, temporary: Path, environment: Mapping[str, str],
    joins: str = "", limit_s: float = RAY_START_S,
) -> Process:  # fmt: skip
    """Start Ray on this node, and wait until it runs.

    Args:
        head: whether this node has Ray's control service, at `port`; else it joins the one at `joins` (host:port).
        address: of this node.
        gpus, cpus: of this node; cpus are places for processes.
        temporary: directory of Ray's session on the first node; a short path.
        environment: variables for it.
        limit_s: until it runs.

    Raises:
        WorkerError: it ended; PortTakenError: because of its port; SlowStartError: it did not start in time, and is
            gone.
    """
    # Not the program `ray`: an environment upon another one's packages has none.
    program = [sys.executable, "-m", "ray.scripts.scripts"]
    role = ["--head", f"--port={port}", f"--temp-dir={temporary}", "--include-dashboard=false"]
    command = [*program, "start", *(role if head else [f"--address={joins}"]), "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
    ray = await Process.start(command, environment)
    said, ended = asyncio.create_task(ray.says(_RAY_STARTED)), asyncio.create_task(ray.wait())
    done, _ = await asyncio.wait({said, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    said.cancel()
    if said in done:
        ended.cancel()
        return ray
    ended.cancel()
    if ended not in done:
        await ray.kill()
        raise SlowStartError(f"Ray did not start within {limit_s:g} s on {address}: {ray.last_line}")
    taken = any(_PORT_TAKEN in line for line in ray.lines)
    error = PortTakenError if taken else WorkerError
    raise error(f"Ray ended with code {ended.result()} on {address}: {ray.last_line}")
