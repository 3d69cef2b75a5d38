"""A command that ends with its owner, even if the owner is killed: it runs under a watchdog (watchdog.py).

Every call ends within a bounded time. An object starts one process once; a restart needs a new object.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from megatron_daro.engine.sglang import watchdog
from megatron_daro.engine.sglang.command import server_environment
from megatron_daro.errors import EngineError

START_TIMEOUT_S = 60.0
"""For the watchdog to start the command; it takes 0.1 s on an idle machine."""
OWNER_GONE_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL when the owner is gone."""
_WATCHDOG_KILL_AFTER_S = 2.0
_TAIL_BYTES = 65536


class ManagedProcess:
    """A command that ends with its owner.

    The owner is the operating-system process that called start(); the command also ends when this object is dropped.

    Args:
        command: program and arguments.
        host: where the command will listen; see server_environment.
        env: environment variables of the user, which override all others.
        log_path: standard output and standard error are appended to it.
        python: the interpreter of the server, which also runs the watchdog.
    """

    def __init__(
        self, command: Sequence[str], *, host: str, env: Mapping[str, str], log_path: Path, python: Path
    ) -> None:
        self._command = list(command)
        self._environment = server_environment(env, host=host, python=python)
        self._log_path = log_path
        self._python = python
        self._log_start = 0
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._input: IO[bytes] | None = None
        self._pid: int | None = None
        self._swept = False

    @property
    def pid(self) -> int | None:
        """Process id of the command, which is also that of its session; None before start()."""
        return self._pid

    def start(self) -> None:
        """Start the command; return when the process exists, before it serves.

        Raises:
            EngineError: started before, or the watchdog could not be started. A command that cannot be executed is not
                an error here: poll() then returns 127, and the log has the reason.
        """
        if self._watchdog is not None:
            raise EngineError(f"process: got start() for {self._command[0]!r} twice; allowed: once per ManagedProcess")
        read_end, write_end = os.pipe()
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._log_start = log.tell()
                self._watchdog = self._start_watchdog(log.fileno(), write_end)
            # Held here, so that it is closed when this object is dropped: Popen lives as long as its process does.
            self._input, self._watchdog.stdin = self._watchdog.stdin, None
        except OSError as error:
            os.close(read_end)
            raise EngineError(
                f"process: could not run {self._python} ({error}); allowed: an executable Python and a log that can be "
                f"written at {self._log_path}"
            ) from error
        finally:
            os.close(write_end)
        self._pid = self._read_pid(read_end)

    def poll(self) -> int | None:
        """Return the exit status of the command, 128 + n after signal n; None before start() and while the command, or
        anything it started, lives."""
        if self._watchdog is None:
            return None
        code = self._watchdog.poll()
        if code is None or code >= 0:
            return code
        self._sweep_session()  # The watchdog was killed: the command died with it, but its children may live.
        return 128 - code

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that this process wrote, from at most the last 64 KiB; empty if there are none."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:]) if lines > 0 else ""

    def kill(self) -> None:
        """Kill the command and all it started, then the watchdog if it does not end by itself. Takes at most 8 s."""
        if self._watchdog is None:
            return
        begin = time.monotonic()
        while (
            self._watchdog.poll() is None and time.monotonic() < begin + _WATCHDOG_KILL_AFTER_S + watchdog.KILL_LIMIT_S
        ):
            watchdog.signal_all(watchdog.descendants(self._watchdog.pid), signal.SIGKILL)
            if time.monotonic() > begin + _WATCHDOG_KILL_AFTER_S:
                self._watchdog.kill()
            time.sleep(0.02)
        if self._input is not None:
            self._input.close()
        self.poll()

    def _start_watchdog(self, log: int, report: int) -> subprocess.Popen[bytes]:
        options = ["--parent-pid", str(os.getpid()), "--grace-s", str(OWNER_GONE_GRACE_S), "--report-fd", str(report)]
        # -I and -S, so that no site directory or environment variable can change the watchdog or slow it down.
        return subprocess.Popen(
            [str(self._python), "-I", "-S", watchdog.__file__, *options, "--", *self._command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            pass_fds=(report,),
            start_new_session=True,
        )

    def _read_pid(self, read_end: int) -> int:
        with os.fdopen(read_end, "rb", buffering=0) as report:
            poller = select.poll()  # select.select fails above 1023 open descriptors
            poller.register(report, select.POLLIN | select.POLLHUP)
            pid_text = report.read(64) if poller.poll(1000 * START_TIMEOUT_S) else b""
        if pid_text:
            return int(pid_text)
        self.kill()
        raise EngineError(
            f"process: the watchdog did not start {self._command[0]!r} within {START_TIMEOUT_S:g} s; it wrote: "
            f"{self.log_tail() or 'nothing'}. Allowed: Python 3.9 or newer on Linux, got {self._python}"
        )

    def _sweep_session(self) -> None:
        """Kill the rest of the command's process group after the watchdog was killed; only the first call does."""
        if self._swept or self._pid is None:
            return
        self._swept = True
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
