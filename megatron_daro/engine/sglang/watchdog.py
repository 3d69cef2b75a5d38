"""Keeps one server process: starts it, and ends it with all its descendants when the trainer is gone.

    python -I -S watchdog.py --parent-pid 123 --grace-s 5 -- command ...

ManagedProcess -> (this, a process of its own) -> SGLang server. It is run with the
server's interpreter, so it uses nothing outside the standard library and runs on Python 3.9 and newer.

The command runs in its own session. It is ended (SIGTERM, after the grace SIGKILL) as soon as standard input ends,
the parent is gone, or the watchdog gets SIGTERM.
The watchdog is the reaper of orphans below it (PR_SET_CHILD_SUBREAPER), so a descendant that made a session of its own
is found as well. If the watchdog itself is killed, the kernel kills the command (PR_SET_PDEATHSIG).

Exit status: that of the command, 128 + n after signal n, 127 when the command cannot be started.
It forwards nothing: neither input nor signals reach the command, except those that end it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys
import time

POLL_S = 0.1
KILL_LIMIT_S = 5.0
"""How long SIGKILL is repeated. Only a process inside an uninterruptible system call outlives it."""

# No import of process_tree.py: the interpreter that runs this may not have the package.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[int]:
    """Return the ids of all living or unreaped descendants of a process, from /proc, parents before their children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would import more than the whole file does
        if name.isdigit():
            children.setdefault(_parent_of(int(name)), []).append(int(name))
    pids = list(children.get(pid, ()))
    for other in pids:  # grows while it is read
        pids += children.get(other, ())
    return pids


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to each; skip those that are gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _parent_of(pid: int) -> int:
    """Return the parent's id, or 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # "pid (name) state ppid ...": the name may hold spaces and brackets.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


class Watchdog:
    """One command and everything below it.

    Args:
        command: program and arguments.
        parent_pid: process whose end ends the command.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, command: list[str], *, parent_pid: int, grace_s: float) -> None:
        self._command = command
        self._parent_pid = parent_pid
        self._grace_s = grace_s
        self._ending = False
        self._status: int | None = None
        self._pid = 0

    def run(self, report: int | None) -> int:
        """Start the command, watch it, end it. Returns the exit status.

        Args:
            report: descriptor that gets the command's process id as a line, then is closed.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._pid = self._start(report)
        if report is not None:
            self._tell(report)
        while self._status is None and not self._ending:
            self._listen(POLL_S)
            self._ending = self._ending or os.getppid() != self._parent_pid
            self._reap()
        if self._status is None:
            self._terminate()
        self._kill_the_rest()
        return 128 + signal.SIGKILL if self._status is None else self._status

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        self._ending = True

    def _start(self, report: int | None) -> int:
        watchdog = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become_command(watchdog, report)
        except (OSError, ValueError) as error:
            os.write(2, f"watchdog: cannot start {self._command[0]!r}: {error}\n".encode())
        finally:
            os._exit(127)  # Whatever happened, the child must not go on as a second watchdog.

    def _become_command(self, watchdog: int, report: int | None) -> None:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watchdog:
            os._exit(127)  # The watchdog died before the kernel was told to watch it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if report is not None:
            os.close(report)
        os.execvp(self._command[0], self._command)

    def _tell(self, report: int) -> None:
        try:
            os.write(report, f"{self._pid}\n".encode())
            os.close(report)
        except BrokenPipeError:
            self._ending = True  # The parent is gone already.

    def _listen(self, timeout_s: float) -> None:
        """Wait for standard input; its end is the order to end the command."""
        if select.select([0], [], [], timeout_s)[0] and not os.read(0, 4096):
            self._ending = True

    def _reap(self) -> None:
        """Collect every child that ended, orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def _terminate(self) -> None:
        """Send SIGTERM to all, and SIGCONT so that a stopped process gets it; then wait for the grace."""
        everyone = descendants(os.getpid())
        signal_all(everyone, signal.SIGTERM)
        signal_all(everyone, signal.SIGCONT)
        deadline = time.monotonic() + self._grace_s
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
            self._reap()

    def _kill_the_rest(self) -> None:
        """Send SIGKILL until no process is left; one that was forked meanwhile is hit in the next round."""
        deadline = time.monotonic() + KILL_LIMIT_S
        while time.monotonic() < deadline:
            survivors = descendants(os.getpid())
            if not survivors:
                return
            signal_all(survivors, signal.SIGKILL)
            time.sleep(POLL_S / 10)
            self._reap()
        print(f"watchdog: processes {descendants(os.getpid())} outlived SIGKILL", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Command line of this file; see its docstring."""
    parser = argparse.ArgumentParser(description="start a command, end it when the parent is gone")
    parser.add_argument("--parent-pid", type=int, default=os.getppid())
    parser.add_argument("--grace-s", type=float, default=5.0)
    parser.add_argument("--report-fd", type=int, default=None)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command after --")
    return Watchdog(command, parent_pid=options.parent_pid, grace_s=options.grace_s).run(options.report_fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
