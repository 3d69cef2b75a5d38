"""The program between a sandbox and the code it runs: makes namespaces and limits, then runs the code in them.

Sandbox -> stdin (JSON) -> (this) -> namespaces -> python. An agent's settings come as an argument, since its standard
input is its own; an agent has no limits here, and its loopback has one port, which a relay connects to the endpoint's
socket. This file is run by `python -I -S`, so it imports the standard library only. Its reports go to a descriptor that
the code never has. The code runs only where every step of the isolation succeeded.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import socket  # imported only where needed: it takes a tenth of the time to start code without it

NOBODY = 65534
_INNER = 1000
_NEW_NS, _NEW_CGROUP, _NEW_UTS, _NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs -> of mount: what a mount must keep when it is made read-only."""
_DETACH = 2
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = (
    1,
    4,
    22,
    24,
    36,
    38,
)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {
    # ptrace, mount, umount2, pivot_root, chroot, swapon, reboot, init_module, keyctl and its two, unshare, setns,
    # process_vm_readv and writev, kcmp, finit_module, open_by_handle_at, perf_event_open, bpf, userfaultfd, kexec,
    # io_uring (3), the new mount calls (428 to 433), clone3 is left: it cannot be read by a filter and needs no right
    "x86_64": [
        *(101, 165, 166, 155, 161, 167, 169, 175, 248, 249, 250, 272, 308, 310, 311, 312, 313, 304, 298, 321, 323),
        *(246, 320, 425, 426, 427, 428, 429, 430, 431, 432, 433),
    ],
    "aarch64": [
        *(117, 40, 39, 41, 51, 224, 142, 105, 217, 218, 219, 97, 268, 270, 271, 272, 273, 265, 241, 280, 282),
        *(104, 294, 425, 426, 427, 428, 429, 430, 431, 432, 433),
    ],
}
_HOARDS = {
    # shmget, semget, msgget, mq_open, memfd_create, memfd_secret, vmsplice, landlock_create_ruleset, socket,
    # setsockopt, inotify_init1, fanotify_init, inotify_init
    "x86_64": [29, 64, 68, 240, 319, 447, 278, 444, 41, 54, 294, 300, 253],
    "aarch64": [194, 190, 186, 180, 279, 447, 75, 444, 198, 208, 26, 262],
}
"""Denied because they hold memory that no process has mapped, and that can therefore not be counted. A socket to which
others can connect may hold what thousands of them sent before they were closed."""
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_MMAP = {"x86_64": 9, "aarch64": 222}
_FORKS = {"x86_64": [57, 58], "aarch64": []}
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
"""System call numbers. Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""
_SHARED_ANONYMOUS, _THREAD, _F_SETPIPE_SZ, _AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 0x21, 0x10000, 1031, 1, 1, 0xF
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AF_INET, _AF_INET6 = 2, 10
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LOAD, _EQUAL, _ABOVE, _ANY_OF, _AND, _BACK = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_EPERM, _ENOSYS, _ALLOWED, _KILLED = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000
_FIRST, _SECOND, _FOURTH = 16, 24, 40
"""Offsets of arguments in struct seccomp_data, the lower halves. Source: seccomp(2); linux/bpf_common.h."""
_DESCRIPTORS = 32
"""Most open files of a process. Each holds at most 0.3 MiB in the kernel: a socket of a pair one and a half times
net.core.wmem_default (208 KiB), a pipe 64 KiB. As many more may be in transit through sockets."""
_libc = ctypes.CDLL(None, use_errno=True)
_Line = tuple[int, int, int, int]
"""A line of a seccomp program: the operation, lines to skip if it is true, lines to skip if it is false, an operand."""


def checked(result: int, what: str) -> None:
    """Raise OSError for a failed call of the C library."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int = 0) -> None:
    """Call prctl(2)."""
    arguments = [ctypes.c_ulong(value)] + [ctypes.c_ulong(0)] * 3
    checked(_libc.prctl(option, *arguments), f"prctl({option})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    kind_ = None if kind is None else kind.encode()
    checked(
        _libc.mount(source.encode(), target.encode(), kind_, ctypes.c_ulong(flags), data.encode()), f"mount {target}"
    )


def enter_namespaces() -> None:
    """Enter mount, process, network, IPC, host name and cgroup namespaces; without root, also a user namespace."""
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_CGROUP
    if os.geteuid() == 0:
        checked(_libc.unshare(flags), "unshare")
    else:
        _enter_user_namespace(flags)


def become_nobody() -> None:
    """If this is root, become nobody in a user namespace of its own, so that its processes are counted separately."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        prctl(_SET_DUMPABLE, 1)  # else uid_map and gid_map belong to root
        _enter_user_namespace(0)


def _enter_user_namespace(others: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    checked(_libc.unshare(_NEW_USER | others), "unshare with a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_INNER} {uid} 1"), ("gid_map", f"{_INNER} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def make_root(names: list[str], scratch_mib: int, writable: str = "") -> None:
    """Make a new root: the given paths, read-only except `writable` and devices, /scratch to write in, and /proc."""
    mount("none", "/", None, _REC | _PRIVATE)
    paths = {name: os.open(name, os.O_PATH) for name in names}  # the new root's mount may hide them
    root, owner = "/tmp", NOBODY if os.geteuid() == 0 else _INNER
    mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path, descriptor in paths.items():
        target = Path(f"{root}{path}")
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        mount(f"/proc/self/fd/{descriptor}", str(target), None, _BIND | _REC)
        os.close(descriptor)
    for mounted in _mounted_below(root):
        flags = os.statvfs(mounted).f_flag
        kept = sum(new for old, new in _KEPT.items() if flags & old)
        open_ = mounted.startswith(f"{root}/dev/") or mounted == f"{root}{writable}"
        mount("none", mounted, None, _REMOUNT | _BIND | _NOSUID | kept | (0 if open_ else _RDONLY))
    for name in ("scratch", "proc", "old"):
        Path(f"{root}/{name}").mkdir()
    # The number of files is limited too: an empty one takes a page of the kernel's memory.
    options = f"size={scratch_mib}m,nr_inodes={scratch_mib * 256},mode=755,uid={owner},gid={owner}"
    mount("tmpfs", f"{root}/scratch", "tmpfs", _NOSUID | _NODEV, options)
    with suppress(OSError):  # a container that hides parts of its own /proc allows no new one; the code then has none
        mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(root)
    checked(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"old"), "pivot_root")
    os.chdir("/")
    checked(_libc.umount2(b"/old", _DETACH), "umount the old root")
    Path("/old").rmdir()
    mount("none", "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _mounted_below(root: str) -> list[str]:
    """Return the mount points below the newest mount at `root`, at any depth, but not those that it hides."""
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = {[row[0] for row in rows if row[4] == root][-1]}
    points = []
    for number, parent, _, _, point, *_ in rows:  # in the order in which they were made
        if parent in below:
            below.add(number)
            points.append(point.encode().decode("unicode_escape"))
    return points


def listen_on_loopback(port: int) -> socket.socket:
    """Bring the network namespace's loopback up, and return a socket that listens on a port of it."""
    import socket

    listener = socket.socket()
    fcntl.ioctl(listener, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    return listener


def start_relay(listener: socket.socket, endpoint: str) -> None:
    """Relay the listener's connections to a Unix socket and back, in a process that the code cannot reach."""
    import socket
    import threading

    if os.fork():
        return
    with suppress(OSError):
        while True:
            near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
            far.connect(endpoint)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()
    os._exit(1)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(1)  # SHUT_WR


def give_up_rights(*, sockets: bool) -> None:
    """Drop every capability for good, and deny system calls that ordinary code never needs."""
    prctl(_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if _libc.prctl(
            _CAPBSET_DROP, ctypes.c_ulong(capability), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
        ):
            break
    machine = platform.machine()
    header, none = struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    checked(_libc.syscall(_CAPSET[machine], header, none), "capset")
    _obey(_filter(machine, sockets=sockets))


def deny_processes() -> None:
    """Deny new processes, not threads. RLIMIT_NPROC would count the user's other processes and not limit root's."""
    _obey(_no_processes(platform.machine()))


def _obey(lines: list[_Line]) -> None:
    """Install one more seccomp program, which the kernel runs at every further system call."""
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(head)
    checked(
        _libc.prctl(_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(pointer), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        "seccomp",
    )


def _filter(machine: str, *, sockets: bool = False) -> list[_Line]:
    """Return a seccomp program: EPERM for the denied calls; a call of another architecture ends the code.

    sockets: allow internet sockets, and what holds memory that is not counted; agents in any language need them.
    """
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[machine]), (_BACK, 0, 0, _KILLED), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        lines += [(_ABOVE, 0, 1, 0x40000000), (_BACK, 0, 0, _KILLED)]  # the x32 numbers
    if sockets:
        lines += [*_denied(_DENIED[machine]), (_EQUAL, 0, 3, _SOCKET[machine]), (_LOAD, 0, 0, _FIRST)]
        lines += [(_EQUAL, 1, 0, _AF_INET), (_EQUAL, 0, 1, _AF_INET6), (_BACK, 0, 0, _ALLOWED)]
        return [*lines, (_BACK, 0, 0, _EPERM)]
    lines += _denied([*_DENIED[machine], *_HOARDS[machine]])
    # mmap(MAP_SHARED | MAP_ANONYMOUS): the kernel keeps all of it when a part is unmapped
    lines += [(_EQUAL, 0, 5, _MMAP[machine]), (_LOAD, 0, 0, _FOURTH), (_AND, 0, 0, _SHARED_ANONYMOUS)]
    lines += [(_EQUAL, 1, 0, _SHARED_ANONYMOUS), (_BACK, 0, 0, _ALLOWED), (_BACK, 0, 0, _EPERM)]
    # socketpair of Unix streams is allowed: asyncio and multiprocessing make one
    lines += [(_EQUAL, 0, 7, _SOCKETPAIR[machine]), (_LOAD, 0, 0, _FIRST), (_EQUAL, 0, 4, _AF_UNIX)]
    lines += [(_LOAD, 0, 0, _SECOND), (_AND, 0, 0, _SOCK_TYPE), (_EQUAL, 0, 1, _SOCK_STREAM)]
    lines += [(_BACK, 0, 0, _ALLOWED), (_BACK, 0, 0, _EPERM)]
    lines += [(_EQUAL, 0, 4, _FCNTL[machine]), (_LOAD, 0, 0, _SECOND), (_EQUAL, 0, 1, _F_SETPIPE_SZ)]
    lines += [(_BACK, 0, 0, _EPERM), (_BACK, 0, 0, _ALLOWED)]
    return [*lines, (_BACK, 0, 0, _ALLOWED)]


def _no_processes(machine: str) -> list[_Line]:
    """Return a seccomp program: EPERM for a new process. It cannot read the arguments of clone3, which gets ENOSYS; the
    C library then calls clone."""
    lines = [(_LOAD, 0, 0, 0), (_EQUAL, 0, 1, _CLONE3), (_BACK, 0, 0, _ENOSYS), *_denied(_FORKS[machine])]
    lines += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _FIRST), (_ANY_OF, 1, 0, _THREAD), (_BACK, 0, 0, _EPERM)]
    return [*lines, (_BACK, 0, 0, _ALLOWED)]


def _denied(numbers: list[int]) -> list[_Line]:
    return [line for number in numbers for line in ((_EQUAL, 0, 1, number), (_BACK, 0, 0, _EPERM))]


def set_limits(limits: dict[str, Any], *, counted_apart: bool) -> None:
    """Limit what the code may use. counted_apart: a user namespace counts its processes separately."""
    mib = 1 << 20
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_mib"] * mib,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_mib"] * mib,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (64, 64))
    if counted_apart:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"] + 2,) * 2)  # this program's two count too
    else:
        deny_processes()


def run_code(settings: dict[str, Any], status: int) -> NoReturn:
    """Run the code, wait for it, and report how it ended; whatever it started ends with this process."""
    directory = settings["directory"]
    for name, text in settings["files"].items():
        Path(directory, name).write_text(text, encoding="utf-8", errors="backslashreplace")
    prctl(_SET_CHILD_SUBREAPER, 1)
    prctl(_SET_DUMPABLE, 0)  # the code, of the same user, must not read this process's memory or descriptors
    report(status, {"started": True})
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)  # it has ended already
        os.setsid()
        os.chdir(directory)
        if "command" in settings:
            os.execvp(settings["command"][0], settings["command"])
        set_limits(settings["limits"], counted_apart=settings["isolation"] == "namespaces")
        os.dup2(os.open("stdin", os.O_RDONLY), 0)
        variables = {"HOME": directory, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONPATH": settings["import_path"]}
        flags = ["-s", "-B", "-S"]
        os.execve(settings["python"], [settings["python"], *flags, *settings["arguments"]], variables)
    while True:
        ended, wait_status, used = os.wait4(-1, 0)
        if ended == pid:
            break
    _end_the_rest()
    report(status, {"exit": os.waitstatus_to_exitcode(wait_status), "cpu_s": used.ru_utime + used.ru_stime})
    os._exit(0)


def _end_the_rest() -> None:
    """End what the code left behind; in a process namespace the kernel does that."""
    while True:
        try:
            survivors = [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
        except OSError:
            return
        if not survivors:
            return
        for pid in survivors:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # its own children are then adopted by this process


def report(status: int, message: dict[str, Any]) -> None:
    """Send the sandbox a message, as one line of JSON."""
    os.write(status, json.dumps(message).encode() + b"\n")


def main(status: int) -> int:
    """Isolate, run, and wait."""
    settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else json.load(sys.stdin)
    os.umask(0o022)
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        return 1
    os.set_inheritable(status, False)
    own_namespaces, endpoint, listener = settings["isolation"] == "namespaces", settings.get("endpoint", ""), None
    try:
        if own_namespaces:
            enter_namespaces()
    except OSError as error:
        report(status, {"refused": str(error)})
        return 1
    parent_lives, parents_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(parents_end)
            if own_namespaces:
                make_root(settings["paths"], settings["limits"]["file_mib"], settings.get("writable", ""))
                listener = listen_on_loopback(settings["port"]) if endpoint else None
                become_nobody()
            if listener:
                prctl(_SET_DUMPABLE, 0)
                start_relay(listener, endpoint)
            give_up_rights(sockets=bool(endpoint))
            prctl(_SET_PDEATHSIG, signal.SIGKILL)  # not earlier: a change of user clears it
            if select.select([parent_lives], [], [], 0)[0]:
                os._exit(1)  # it has ended already
            os.close(parent_lives)
            run_code(settings, status)
        except (OSError, KeyError) as error:
            report(status, {"refused": f"{type(error).__name__}: {error}"})
            os._exit(1)
    os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
