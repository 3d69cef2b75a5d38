"""What every worker process does: limits itself, answers each line of JSON with one line of JSON, ends with its parent.

WorkerPool -> stdin -> (this) -> stdout -> WorkerPool. Started as `python -m`, never forked, so
that it holds no thread, lock or GPU context of the trainer and never imports the trainer's main module.
The kernel kills it when its parent dies, and it ends when stdin closes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megatron_daro.errors import DaroError

MIB = 1024 * 1024
EXIT_MEMORY = 3
EXIT_ORPHAN = 4
REFUSED = "refused"
"""The reason of a reply that ends the run: a user's class does not do what its Protocol says."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Request -> reply, a mapping with `reason`. It may raise MemoryError only."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL when the parent's starting thread ends; leave at once if it already has.

    Source: prctl(2), PR_SET_PDEATHSIG. On other systems than Linux only the closed stdin ends an orphan.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what it starts stays below it, so the pool can end it
    if os.getppid() != parent_pid:
        sys.exit(EXIT_ORPHAN)


def limit_resources(memory_mib: int) -> None:
    """Forbid core files, and bound the address space well above the limit on resident memory.

    The pool measures resident memory and kills. This bound stops one huge allocation between two measurements.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound = (2 * memory_mib + 256) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def peak_mib() -> float:
    """Return the highest resident memory of this process so far."""
    # Not ru_maxrss: after fork and exec that still holds the parent's peak, so a large driver would be blamed here.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def serve(answer: Answer, requests: BinaryIO, replies: BinaryIO, *, timeout_s: float, memory_mib: int) -> int:
    """Answer until stdin closes or memory was exceeded. Returns the exit status.

    The timer is the last resort of a worker whose parent hangs: its default action ends the process.
    """
    own = os.getpid()
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, 4 * timeout_s + 5)
        try:
            reply = answer(json.loads(line))
        except MemoryError:
            reply = {"reason": "memory"}
        if os.getpid() != own:
            os._exit(0)  # a fork that returned from `answer`: its parent replies
        signal.setitimer(signal.ITIMER_REAL, 0)
        if peak_mib() > memory_mib:
            reply = {"reason": "memory"}
        send(replies, reply)
        if reply["reason"] == "memory":
            return EXIT_MEMORY
    return 0


def send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    """Write one reply."""
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def main(argument: str, load: Callable[[dict[str, Any]], Answer], *, bounds_addresses: bool = True) -> int:
    """Set limits, load, say `ready`, serve.

    Args:
        argument: the only one of the command line. load: makes the `Answer` from the program's settings; a DaroError
            that it raises is for the user, and ends the run. bounds_addresses: whether the address space is bounded;
            not where the worker runs other programs, some of which (Node, Java) reserve far more than they use.
    """
    limits = json.loads(argument)
    settings = limits.pop("settings")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(limits.pop("parent_pid"))
    if bounds_addresses:
        limit_resources(limits["memory_mib"])
    # The protocol keeps its own descriptor: whatever a library prints must not reach it.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        answer = load(settings)
    except DaroError as error:
        send(replies, {"reason": REFUSED, "error": str(error)})
        return 1
    if peak_mib() > limits["memory_mib"]:
        raise MemoryError(f"a worker alone needs {peak_mib():.0f} MiB, memory_mib is {limits['memory_mib']}")
    send(replies, {"reason": "ready"})
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that nothing else reads requests
    return serve(answer, requests, replies, **limits)
