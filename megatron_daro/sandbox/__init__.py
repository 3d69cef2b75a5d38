"""Runs untrusted Python code, such as a model's output, in a process of its own without network or files.

Code, input and limits -> child.py in namespaces of its own -> what it printed, and how it ended. The sandbox refuses to
run where the kernel does not give the isolation that was asked for; each run has a time limit.

The code has no network, no capabilities, no files but Python's (read-only) and a directory in memory, and its system
calls are filtered. The memory of all its processes, page tables included, is added up every 20 ms; files take up to
`file_mib` on top. Whatever would hold memory that belongs to no process is denied: memfd, `mmap.mmap(-1, n)`, System V
IPC, inotify, larger buffers of pipes and sockets, and sockets other than `socket.socketpair()`, which asyncio needs.
The remaining kernel memory is bounded: each process has at most 32 open files, which hold up to 10 MiB (0.3 MiB for a
socket where `net.core.wmem_default` is Linux's 208 KiB), as many again may be in transit through sockets, and mappings
take up to a sixteenth of `memory_mib`. With the default limits this is at most 220 MiB beyond `memory_mib: 256`.

`isolation: limits` is for trusted code: it can read and write every file that the user can, and `/dev/shm` has no
limit. It may start threads, but no processes. Whether code exceeds `wall_s` depends on the machine's load; for runs
that repeat exactly, set `cpu_s` well below `wall_s`.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_daro.errors import SandboxError
from megatron_daro.process_tree import descendants, kill_all
from megatron_daro.sandbox.child import NOBODY

Isolation = Literal["namespaces", "limits"]
Reason = Literal["ok", "error", "time", "cpu", "memory", "output", "killed"]
_POLL_S = 0.02
_START_S = 60.0
"""Longest time until the code begins; a busy machine makes namespaces slowly."""
_OVERHEAD_MIB = 16
"""Memory of child.py's own processes."""
_STARTS = 3
"""How many times in all a sandbox that is killed from outside is started."""
_OWN_MEMORY = re.compile(r"^(?:RssAnon|VmSwap|VmPTE|HugetlbPages):\s+(\d+) kB$", re.MULTILINE)
_CHILD = Path(__file__).with_name("child.py")
_DEVICES = ("/dev/null", "/dev/urandom")
"""Not /dev/zero: mapping it gives memory that is not counted."""
_SYSTEM = ("/bin", "/sbin", "/usr", "/etc", "/opt")
AGENT_PORT = 8000
"""The port of its endpoint on an agent's own loopback."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of code may use.

    wall_s: seconds from the start of the code. cpu_s: CPU time of each process, whole seconds. memory_mib: address
    space of each process, and memory of all together; the kernel's memory for open files and mappings is on top, up to
    10 MiB and a sixteenth of memory_mib for each process. output_bytes: of standard output and error together.
    file_mib: of all files, whose memory is on top. processes: at once, threads included.
    """

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mib: int = 256
    output_bytes: int = 16384
    file_mib: int = 16
    processes: int = 8

    def __post_init__(self) -> None:
        wrong = [f"{name} {value}" for name, value in asdict(self).items() if value <= 0]
        if wrong:
            raise SandboxError(f"sandbox limits: got {', '.join(wrong)}; allowed: above 0; correct them")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. output: standard output and error in the order they came, at most `output_bytes`, read as UTF-8.

    reason: ok; error: an exit status other than 0; time, cpu, memory, output: the limit at which it was ended; killed:
    by another signal. status: the exit status, or minus the signal; None where it is not known.
    """

    output: str
    reason: Reason
    status: int | None = None
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs Python code, each time in new namespaces. Immutable, so usable from several threads.

    isolation: `namespaces`: no network, none of the machine's files but Python's own (read-only), a directory in memory
    to write to, no other process in sight, no capabilities. `limits`: for code that you trust: it cannot start
    processes, its threads are not counted, and it reads and writes every file that you can, so `file_mib` limits each
    file, and nothing limits files in memory (/dev/shm). Both deny what holds memory that belongs to no process: memfd,
    anonymous shared mappings, System V, inotify, larger buffers of pipes and sockets, and sockets other than
    `socket.socketpair()`, which asyncio needs. read_only: more paths that the code may read, for instance of packages;
    import_path: the paths among them that Python imports from.

    The calling thread must outlive a run: Linux kills the code when that thread ends.
    """

    limits: Limits = field(default_factory=Limits)
    isolation: Isolation = "namespaces"
    read_only: tuple[str, ...] = ()
    import_path: tuple[str, ...] = ()

    def check(self) -> None:
        """Run one line of code. Raises SandboxError, with the reason, where this machine lacks the isolation."""
        outcome = self.run("print(6 * 7)")
        if outcome.output.strip() != "42":
            raise SandboxError(
                f"sandbox: `print(6 * 7)` ended with {outcome.reason}, status {outcome.status}, and said "
                f"{outcome.output[-300:]!r}; allowed: 42; raise its limits (memory_mib is {self.limits.memory_mib})"
            )

    def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> Outcome:
        """Run code as a program of its own, in a directory that holds `files`, and wait until it ends.

        Code that SIGKILL ended before it reached a limit is run again, since the signal may have come from outside
        (from the kernel, out of memory); only once where the code may have sent it itself.

        Args:
            code: Python. stdin: what it can read from standard input. files: name -> text. arguments: of the program.

        Raises:
            SandboxError: the isolation is not available here, a file's name is not a plain one, or the sandbox's own
            processes, which the code cannot reach, were killed three times.
        """
        files = {**(files or {}), "main.py": code, "stdin": stdin}
        odd = [name for name in files if "/" in name or name in ("", ".", "..") or "\0" in name]
        if odd:
            raise SandboxError(f"sandbox files: got the name {odd[0]!r}; allowed: a plain file name; rename it")
        code_killed = 0
        for _ in range(_STARTS):
            outcome = self._run_once(files, arguments)
            code_killed += outcome.status is not None
            if outcome.reason != "killed" or outcome.status not in (None, -signal.SIGKILL) or code_killed == 2:
                return outcome
        raise SandboxError(
            f"sandbox: its own processes were killed from outside {_STARTS} times; allowed: that they live until the "
            "code ends; look for the out-of-memory killer in the system's log, or lower the number of workers"
        )

    def _run_once(self, files: Mapping[str, str], arguments: Sequence[str]) -> Outcome:
        if self.isolation == "namespaces":
            return self._run(files, arguments, "/scratch")
        with tempfile.TemporaryDirectory(prefix="daro_sandbox_") as directory:
            return self._run(files, arguments, directory)

    def _run(self, files: Mapping[str, str], arguments: Sequence[str], directory: str) -> Outcome:
        python = os.path.realpath(sys.executable)
        paths = [*_python_paths(python), *_DEVICES, *self.read_only]
        settings = {
            "parent": os.getpid(),
            "isolation": self.isolation,
            "paths": _outermost(paths),
            "python": python,
            "arguments": ["main.py", *arguments],
            "import_path": os.pathsep.join(self.import_path),
            "directory": directory,
            "files": dict(files),
            "limits": asdict(self.limits),
        }
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env={},
                cwd="/",
                start_new_session=True,
            )
            os.close(writer)
            return _Watch(process, reader, self).outcome(json.dumps(settings).encode())
        finally:
            os.close(reader)


class _Watch:
    """One run, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, sandbox: Sandbox) -> None:
        self._process, self._status, self._sandbox = process, status, sandbox
        self._output, self._said = bytearray(), bytearray()

    def outcome(self, settings: bytes) -> Outcome:
        """Pass the settings to child.py and watch the run. Raises SandboxError."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            try:
                process.stdin.write(settings)
                process.stdin.close()
            except BrokenPipeError:
                pass  # child.py reports the reason on the other descriptor
            ended_by = self._watch(process.stdout.fileno())
        finally:
            _end(process)
            process.stdout.close()
        return self._judged(ended_by)

    def _watch(self, output: int) -> Reason | None:
        """Read until the code has ended, or return the limit that it passed."""
        limits, deadline, started = self._sandbox.limits, time.monotonic() + _START_S, False
        open_ends = {output: self._output, self._status: self._said}
        polled = 0.0
        while open_ends:
            now = time.monotonic()
            if now > deadline:
                return "time"
            for descriptor in select.select([*open_ends], [], [], min(_POLL_S, deadline - now))[0]:
                chunk = os.read(descriptor, 65536)
                open_ends[descriptor] += chunk
                if not chunk:
                    del open_ends[descriptor]
            if not started and self._said:
                started, deadline = True, time.monotonic() + limits.wall_s
            if len(self._output) > limits.output_bytes:
                return "output"
            if self._status not in open_ends:
                return None  # the code and all it started are gone
            if now - polled > _POLL_S:
                polled = now
                if memory_mib(self._process.pid) > limits.memory_mib + _OVERHEAD_MIB:
                    return "memory"
        return None

    def _judged(self, ended_by: Reason | None) -> Outcome:
        limits = self._sandbox.limits
        output = bytes(self._output[: limits.output_bytes]).decode(errors="replace")
        reports = _reports(bytes(self._said), self._sandbox.isolation)
        if ended_by is not None:
            return Outcome(output, ended_by)
        if "exit" not in reports:
            return Outcome(output, "killed")
        status, cpu_s = int(reports["exit"]), float(reports["cpu_s"])
        reason: Reason = "ok" if status == 0 else "error" if status > 0 else "killed"
        if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu_s >= limits.cpu_s):
            reason = "cpu"
        return Outcome(output, reason, status, cpu_s)


def confined(command: Sequence[str], *, folder: str, endpoint: str, status: int) -> list[str]:
    """Return the command line that runs an agent's program in namespaces: the program can write to one folder, reach
    one endpoint on port `AGENT_PORT` of its loopback and nothing else, and read the system's programs, Python, the
    directory that it is started in, PYTHONPATH, and what the command names by absolute paths. Its time and memory are
    not limited.

    Args:
        folder: to write in. endpoint: a Unix socket that any user may write to. status: a descriptor, whose text
            `exit_status` reads.
    """
    here = str(Path.cwd())
    prefixes = (sys.prefix, sys.base_prefix, here, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    absolute = [one for one in (*prefixes, *command) if one.startswith("/") and one != "/"]
    named = [*absolute, *map(os.path.realpath, absolute)]  # a virtual environment may be a link
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    settings = {
        "parent": os.getpid(),
        "isolation": "namespaces",
        "paths": [*_outermost([*_python_paths(sys.executable), *_SYSTEM, *_DEVICES, *named]), folder, endpoint],
        "writable": folder,
        "endpoint": endpoint,
        "port": AGENT_PORT,
        "command": list(command),
        "directory": here,
        "files": {},
        "limits": {"file_mib": 1},
    }
    return [sys.executable, "-I", "-S", str(_CHILD), str(status), json.dumps(settings)]


def exit_status(said: str) -> int:
    """Return the exit status of a confined program, from what was written to its descriptor. Raises SandboxError."""
    return int(_reports(said).get("exit", -signal.SIGKILL))


def _reports(said: str | bytes, isolation: Isolation = "namespaces") -> dict[str, Any]:
    """Return what child.py reported in its lines of JSON, merged. Raises SandboxError where it refused to run."""
    reports: dict[str, Any] = {}
    for line in said.splitlines():
        reports |= json.loads(line)
    if "refused" in reports:
        raise SandboxError(
            f"sandbox: isolation {isolation} is not to be had here ({reports['refused']}); allowed: "
            "Linux on x86-64 or aarch64 that lets users make namespaces (sysctl user.max_user_namespaces above 0, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that allows "
            "unshare and mount); or, for code that you trust, isolation='limits'"
        )
    return reports


def _python_paths(python: str) -> Iterator[str]:
    """Return what Python needs to run without packages."""
    yield python
    yield from (sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}), f"{sys.base_exec_prefix}/lib")
    yield from _LIBRARIES


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that exist and do not lie within another one."""
    there = sorted({str(Path(path).absolute()) for path in paths if Path(path).exists()})
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def memory_mib(pid: int) -> float:
    """Return the memory in MiB of all processes that a process started: anonymous memory, swapped out or not, and page
    tables, but no mapped files."""
    kib = 0
    for one in descendants(pid):
        with suppress(OSError):
            kib += sum(map(int, _OWN_MEMORY.findall(Path(f"/proc/{one}/status").read_text())))
    return kib / 1024


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the code and all that it started."""
    kill_all(reversed(descendants(process.pid)))
    process.kill()
    process.wait()
