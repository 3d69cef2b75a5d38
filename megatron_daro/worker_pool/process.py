"""The pool's end of one worker process: start, ask with a limit on time and memory, kill.

WorkerPool -> (this) -> worker. Text in, text out, as JSON: no pickle is read from a process
that handled model answers.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.errors import DaroError
from megatron_daro.process_tree import descendants, kill_all
from megatron_daro.worker_pool.child import MIB, REFUSED

START_TIMEOUT_S = 180.0
# A runnable worker that got less than this share of its limit as CPU time is waited for up to PATIENCE times the limit:
# the machine was slow, not the work.
CPU_SHARE = 0.5
PATIENCE = 3
MEMORY_POLL_S, ONCE_POLL_S = 0.02, 0.25  # hundreds of whole programs may run at once, each looked at in /proc
_STDERR_CHARS = 600


class WorkerTimeoutError(Exception):
    """The worker did not answer within the limit."""


class WorkerUnreachedError(Exception):
    """The limit passed, but the worker is stopped or never took the request: nothing is known about the request."""


class WorkerMemoryError(Exception):
    """The worker's resident memory passed the limit."""


class WorkerCrashError(Exception):
    """The worker ended, or wrote something that is no reply."""


@dataclass(frozen=True, slots=True)
class Program:
    """What the workers of a pool run.

    module: started as `python -m`, with one argument: JSON of `settings`, timeout_s, memory_mib and parent_pid. name:
    of the pool and its workers, for messages. section: of the configuration that holds `memory_mib` and the like.
    needs: how much memory a worker needs, in words for a message. error: what the pool raises. once: each request runs
    a program: when its worker ends it is not given to another, and it is ended when nobody waits for it any more.
    """

    module: str
    settings: Mapping[str, Any]
    name: str
    section: str
    needs: str
    error: type[DaroError]
    once: bool = False


class WorkerProcess:
    """One worker. Not thread-safe: one dispatcher thread owns it, starts it and asks it.

    The starting thread must live as long as the worker: Linux delivers the parent-death signal per thread.
    """

    def __init__(self, program: Program, *, timeout_s: float, memory_mib: int) -> None:
        self._program = program
        self.killed_at_start = False
        """Whether a signal ended it before it was ready: not its own fault, so another start may succeed."""
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker, closed by kill()

    def start(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Start and wait until the worker is ready.

        Args:
            stopping: asked while waiting; true gives up.

        Raises: the program's error when it does not become ready; the message has the end of its standard error.
        """
        program = self._program
        limits = {"timeout_s": self._timeout_s, "memory_mib": self._memory_mib, "parent_pid": os.getpid()}
        argument = json.dumps({"settings": dict(program.settings), **limits})
        command = [sys.executable, "-P", "-m", program.module, argument]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env=_environment(),
                start_new_session=True,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            reply = self._exchange(b"", START_TIMEOUT_S, None, stopping)
        except (OSError, WorkerCrashError, WorkerTimeoutError, WorkerUnreachedError) as error:
            last_words = self._last_words()
            self.killed_at_start = self._process is not None and (self._process.poll() or 0) < 0
            self.kill()
            raise program.error(
                f"{program.name} worker: could not start ({type(error).__name__}: {error}); it said: "
                f"{last_words or 'nothing'}. Allowed: ready within {START_TIMEOUT_S:g} s with "
                f"{program.section}.memory_mib {self._memory_mib}. "
                f"Raise {program.section}.memory_mib ({program.needs}) or repair the installation"
            ) from error
        if reply.get("reason") != "ready":
            self.kill()
            if reply.get("reason") == REFUSED:
                raise program.error(str(reply["error"]))
            raise program.error(
                f"{program.name} worker: expected the reply 'ready', got {reply!r}; reinstall the package"
            )

    def ask(self, request: dict[str, Any], stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Args:
            request: what the program takes, to be written as JSON.
            stopping: asked while waiting; true gives up with WorkerCrashError.

        Returns: the reply, with `reason`.
        Raises: WorkerTimeoutError, WorkerUnreachedError, WorkerMemoryError, WorkerCrashError; the worker must then be
        killed.
        """
        if self._process is None:
            raise WorkerCrashError("not running")
        line = json.dumps(request).encode() + b"\n"
        return self._exchange(line, self._timeout_s, self._memory_mib, stopping)

    def kill(self) -> None:
        """End the worker and collect it. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        started = descendants(process.pid)  # the worker adopts their orphans, so none is missed
        with suppress(OSError):  # its process group, which it leads
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        kill_all(started)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        self._buffer = b""
        self._stderr.close()

    def _exchange(
        self, request: bytes, limit_s: float, memory_mib: int | None, stopping: Callable[[], bool]
    ) -> dict[str, Any]:
        """Write the request, which may be more than the pipe holds, and return the reply."""
        process, deadline = self._process, time.monotonic() + limit_s
        assert process is not None and process.stdin is not None and process.stdout is not None
        requests, replies, unsent = process.stdin.fileno(), process.stdout.fileno(), memoryview(request)
        poll_s = ONCE_POLL_S if self._program.once else MEMORY_POLL_S
        poller = select.poll()
        poller.register(replies, select.POLLIN | select.POLLHUP)
        if unsent:
            poller.register(requests, select.POLLOUT)
        # CPU time before this request, less the first 20 ms of it: most replies come sooner and need no look at /proc.
        cpu_before_s: float | None = None
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._check_overdue(limit_s, -left_s, cpu_before_s)
                left_s = poll_s
            ready = dict(poller.poll(1000 * min(left_s, poll_s)))
            if not ready:
                if stopping():
                    raise WorkerCrashError("the pool is closing")
                cpu_before_s = activity(process.pid)[1] if cpu_before_s is None else cpu_before_s
                if memory_mib is not None and memory_of_all_mib(process.pid) > memory_mib:
                    raise WorkerMemoryError(f"more than {memory_mib} MiB resident")
                continue
            if requests in ready:
                try:
                    unsent = unsent[os.write(requests, unsent) :]
                except OSError as error:
                    raise WorkerCrashError(str(error)) from error
                if not unsent:
                    poller.unregister(requests)
            if replies not in ready:
                continue
            chunk = os.read(replies, 65536)
            if not chunk:
                raise WorkerCrashError(f"exit status {process.wait()}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise WorkerCrashError("the reply is no JSON") from error
        if not isinstance(reply, dict):
            raise WorkerCrashError("the reply is no JSON object")
        return reply

    def _check_overdue(self, limit_s: float, late_s: float, cpu_before_s: float | None) -> None:
        """Raise what a passed limit means; return when the worker is only starved and may go on for a while."""
        process = self._process
        assert process is not None and process.stdin is not None
        state, cpu_s = activity(process.pid)
        if state in "Tt" or _unread_bytes(process.stdin.fileno()) > 0:
            raise WorkerUnreachedError(f"state {state} after the limit of {limit_s:g} s")
        starved = state in "RD" and cpu_s - (cpu_before_s or 0.0) < CPU_SHARE * limit_s
        if not starved or late_s > (PATIENCE - 1) * limit_s:
            raise WorkerTimeoutError("no reply within the limit")

    def _last_words(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read()[-_STDERR_CHARS:].decode(errors="replace")
        return " ".join(text.split())


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process; 0 when it is gone or the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def memory_of_all_mib(pid: int) -> float:
    """Return the resident memory of a process and of all that it started."""
    return sum(resident_mib(one) for one in (pid, *descendants(pid)))


def activity(pid: int) -> tuple[str, float]:
    """Return (state letter, CPU seconds so far) of a process; ("?", infinity) when it is gone or there is no /proc.

    Source: proc_pid_stat(5), fields 3, 14 and 15, counted from the end of the command name, which may hold blanks.
    """
    try:
        columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return columns[0], (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "?", float("inf")


def _unread_bytes(descriptor: int) -> int:
    """Return how many bytes of a pipe its reader has not taken yet; 0 where the system does not say."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return 0
    return count[0]


def _environment() -> dict[str, str]:
    """Return the parent's environment with the parent's import path, no GPU, one thread.

    Pure-Python integers: GMP aborts the process when memory runs out, Python raises MemoryError.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    single = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **single, "PYTHONPATH": path, "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
