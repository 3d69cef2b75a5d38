"""The program a verifier worker process runs: limits itself, answers one line of JSON per line of JSON.

RewardPool -> stdin -> (this) -> stdout -> RewardPool. Started as `python -m`, never forked, so
that it holds no thread, lock or GPU context of the trainer and never imports the trainer's main module.
Refuses to outlive its parent: the kernel kills it when the parent dies, and it ends when stdin closes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from megatron_daro.errors import DaroError, RewardError
from megatron_daro.reward.base import Job, ScreenLimits, StagedVerifier, VerifierSpec
from megatron_daro.reward.factory import OwnVerifier, verifier_of

MIB = 1024 * 1024
EXIT_MEMORY = 3
EXIT_ORPHAN = 4
REFUSED = "refused"
"""The reason of a reply that ends the run: a user's class does not do what its Protocol says."""
_PR_SET_PDEATHSIG = 1
# One of each grammar form: the parser builds its tables on first use, 20 to 100 ms per form.
_WARM_UP = (
    r"\frac{1}{2}+\sqrt{3}",
    r"(x+1)^{2}-\cos (2 t)",
    "(1,2)",
    "[2,5)",
    r"2 \leq x < 5",
    r"y=2x+3",
    r"\{1,-2\}",
    r"90^{\circ}",
    r"3 \times 10^{-5}",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"(-\infty,0) \cup (3,\infty)",
    r"\frac{\pi}{2} e^{-2 t}",
    r"\log _{2} n",
    r"10 \%",
    r"5 \text{ cm}",
)
# Modules that sympy loads at its first simplification, solution and set comparison must not count as an answer's time.
_WARM_UP_PAIRS = (("x^2+2x+1", "(x+1)^2"), ("[2,5]", r"2 \leq x \leq 5"), ("y=2x+3", "2x-y+3=0"))


def settings_json(spec: VerifierSpec, *, timeout_s: float, memory_mib: int, parent_pid: int) -> str:
    """Return the worker's only command line argument."""
    return json.dumps(
        {"spec": asdict(spec), "timeout_s": timeout_s, "memory_mib": memory_mib, "parent_pid": parent_pid}
    )


def spec_from(fields: dict[str, Any]) -> VerifierSpec:
    """Return the spec from its JSON form."""
    return VerifierSpec(**{**fields, "limits": ScreenLimits(**fields["limits"])})


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL when the parent's starting thread ends; leave at once if it already has.

    Source: prctl(2), PR_SET_PDEATHSIG. Elsewhere than on Linux only the closed stdin ends an orphan.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(EXIT_ORPHAN)


def limit_resources(memory_mib: int) -> None:
    """No core files; address space bounded well above the limit on resident memory.

    The pool measures resident memory and kills. The bound here stops one huge allocation between two measurements.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound = (2 * memory_mib + 256) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def answer(verifier: StagedVerifier, request: dict[str, Any]) -> dict[str, Any]:
    """One reply. Outcomes are words; rewards are added from them by the pool, but for those of a user's verifier."""
    if request["kind"] == "gold":
        return {"reason": verifier.gold_problem(request["gold"]) or "usable"}
    verdict = verifier.judge(Job(request["answer"], request["gold"], request["statement"]))
    reply = {"correct": verdict.correct, "reason": verdict.reason}
    return reply | {"reward": verdict.reward} if isinstance(verifier, OwnVerifier) else reply


def peak_mib() -> float:
    """Highest resident memory of this process so far."""
    # Not ru_maxrss: after fork and exec that still holds the parent's peak, so a large driver would be blamed here.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def serve(verifier: StagedVerifier, requests: BinaryIO, replies: BinaryIO, *, timeout_s: float, memory_mib: int) -> int:
    """Answer until stdin closes or memory was exceeded. Returns the exit status.

    The timer is the last resort of a worker whose parent hangs: its default action ends the process.
    """
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, 4 * timeout_s + 5)
        try:
            reply = answer(verifier, json.loads(line))
        except MemoryError:
            reply = {"correct": False, "reason": "memory"}
        except RecursionError:
            reply = {"correct": False, "reason": "too_complex"}
        except RewardError as error:  # the class is wrong, not the answer
            reply = {"reason": REFUSED, "error": str(error)}
        except Exception:  # The border of the process: a fault of the verifier costs one verdict, counted by the pool.
            reply = {"correct": False, "reason": "verifier_failed"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        if peak_mib() > memory_mib:
            reply = {"correct": False, "reason": "memory"}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
        if reply["reason"] == "memory":
            return EXIT_MEMORY
    return 0


def main(argument: str) -> int:
    """Set limits, load the verifier, say `ready`, serve."""
    settings = json.loads(argument)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(settings["parent_pid"])
    limit_resources(settings["memory_mib"])
    # The protocol keeps its own descriptor: whatever a library prints must not reach it.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    verifier: Any = verifier_of(spec_from(settings["spec"]))
    if isinstance(verifier, OwnVerifier):
        try:
            verifier.load()
        except DaroError as error:
            replies.write(json.dumps({"reason": REFUSED, "error": str(error)}).encode() + b"\n")
            return 1
    if settings["spec"]["name"] == "math":
        from megatron_daro.reward.symbolic import equal, parsed

        for form in _WARM_UP:
            parsed(form)
        for left, right in _WARM_UP_PAIRS:
            equal(left, right)
    if peak_mib() > settings["memory_mib"]:
        raise MemoryError(f"the verifier alone needs {peak_mib():.0f} MiB, memory_mib is {settings['memory_mib']}")
    replies.write(b'{"reason": "ready"}\n')
    replies.flush()
    limits = {name: settings[name] for name in ("timeout_s", "memory_mib")}
    return serve(verifier, sys.stdin.buffer, replies, **limits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
