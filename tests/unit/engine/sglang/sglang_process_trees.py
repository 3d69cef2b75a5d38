"""Commands that are hard to end, and the question which processes live, for the tests of watchdog and process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
"""Python code: ignore SIGTERM."""
FROZEN = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n"
"""Python code: stop as a debugger would."""
SLEEP = "import time; time.sleep(600)\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def tree(pids: Path, *, root_code: str = "", own_session: bool = False) -> list[str]:
    """A command with a child and a grandchild that ignore SIGTERM; each adds its process id to a file.

    Args:
        root_code: runs in the command itself once the file has all three.
        own_session: the child leaves the command's session, as a daemon does.
    """
    note = f"import os\ndef note():\n    open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    wait = f"import time\nwhile open({str(pids)!r}).read().count('\\n') < 3: time.sleep(0.01)\n"
    leave = "    os.setsid()\n" if own_session else ""
    child = f"if os.fork() == 0:\n{leave}    os.fork()\n    note()\n    {SLEEP}"
    return python(f"{STUBBORN}{note}note()\n{child}{wait}{root_code}{SLEEP}")


def read_pids(path: Path, number: int = 3) -> list[int]:
    """The process ids in a file, once there are that many."""
    eventually(lambda: path.exists() and path.read_text().count("\n") >= number, f"{number} process ids in {path}")
    return [int(line) for line in path.read_text().split()]


def state(pid: int) -> str:
    """R, S, T, Z, ... as in /proc; X when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pids: list[int]) -> list[int]:
    """Those that are neither gone nor waiting to be collected (by a container's init, for orphans)."""
    return [pid for pid in pids if state(pid) not in "XZ"]


def eventually(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Wait for a condition; the limit is for a machine under load."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {limit_s:g} s"
        time.sleep(0.01)
