"""What code in a sandbox finds around it: mounts, rights, limits, and which system calls are refused."""

from __future__ import annotations

import re
import resource
import struct
from pathlib import Path

import pytest
import sandboxed

from megatron_daro.sandbox import Limits, Sandbox, child

BOX = Sandbox(Limits(wall_s=20.0, cpu_s=10, memory_mib=128, file_mib=4, processes=6))


@pytest.fixture(scope="module", autouse=True)
def _isolated():
    sandboxed.require(BOX)


def lines_of(code, box=BOX):
    outcome = box.run(code)
    assert outcome.reason == "ok", outcome
    return outcome.output.splitlines()


def test_each_mount_allows_what_it_must_and_no_more():
    """Python's own files are read-only; devices can be written to; nothing runs with another user's rights."""
    told = {}
    for line in lines_of("print(open('/proc/self/mountinfo').read(), end='')"):
        words = line.split()
        told[words[4]] = {*words[5].split(",")} - {"relatime", "noatime", "nodiratime"}, words[-1].split(",")
    assert told["/"][0] == {"ro", "nosuid", "nodev"}
    assert told["/scratch"][0] == {"rw", "nosuid", "nodev"} and "size=4096k" in told["/scratch"][1]
    if "/proc" in told:
        assert told["/proc"][0] == {"rw", "nosuid", "nodev", "noexec"}
    devices = {path: options for path, (options, _) in told.items() if path.startswith("/dev/")}
    assert {*devices} == {"/dev/null", "/dev/urandom"}
    assert all({"rw", "nosuid"} <= options and "nodev" not in options for options in devices.values())
    others = {path: options for path, (options, _) in told.items() if path not in (*devices, "/", "/scratch", "/proc")}
    assert others and all({"ro", "nosuid"} <= options for options in others.values())


def test_it_is_nobody_in_a_directory_of_its_own_with_nothing_of_the_machine():
    names = "net", "ipc", "uts", "pid", "mnt", "cgroup", "user"
    code = f"""import os
print(os.getuid(), os.getgid(), os.getgroups(), oct(os.umask(0)), os.getcwd(), os.getsid(0) == os.getpid())
print(sorted(os.listdir('/proc/self/fd')), sorted(os.environ.items()))
print({{'old', 'tmp', 'home'}} & {{*os.listdir('/')}}, sorted(os.listdir('/dev')), sorted(os.listdir('.')))
print(*(os.readlink('/proc/self/ns/' + name) for name in {names}))
"""
    first, second, third, spaces = lines_of(code)
    assert first == "1000 1000 [] 0o22 /scratch True"
    variables = [("HOME", "/scratch"), ("LANG", "C.UTF-8"), ("PYTHONHASHSEED", "0"), ("PYTHONPATH", "")]
    assert second == f"{['0', '1', '2', '3']} {variables}"  # 3 is the directory that is being listed
    assert third == "set() ['null', 'urandom'] ['main.py', 'stdin']"
    assert not {str(Path(f"/proc/self/ns/{name}").readlink()) for name in names} & {*spaces.split()}


def test_the_limits_are_those_of_the_kernel():
    code = (
        "import os, resource as r\n"
        "print([r.getrlimit(x) for x in (r.RLIMIT_CORE, r.RLIMIT_CPU, r.RLIMIT_AS, r.RLIMIT_FSIZE)])\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE), r.getrlimit(r.RLIMIT_SIGPENDING), r.getrlimit(r.RLIMIT_NPROC))"
    )
    mib = 2**20
    own = resource.getrlimit(resource.RLIMIT_NPROC)
    for isolation, processes in (("namespaces", (8, 8)), ("limits", own)):
        told = lines_of(code, Sandbox(BOX.limits, isolation=isolation))
        assert told[0] == f"[(0, 0), (10, 11), ({128 * mib}, {128 * mib}), ({4 * mib}, {4 * mib})]"
        assert told[1] == f"(32, 32) (64, 64) {processes}"


def test_packages_are_imported_from_the_paths_that_were_given(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"package_{name}.py").write_text(f"word = {name!r}")
    tmp_path.chmod(0o755)
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    code = "import package_a, package_b\nprint(package_a.word + package_b.word)"
    assert lines_of(code, Sandbox(BOX.limits, read_only=paths, import_path=paths)) == ["ab"]
    assert "No module named" in Sandbox(BOX.limits, read_only=paths).run(code).output
    nested = (str(tmp_path / "a"), str(tmp_path), str(tmp_path / "gone"), str(tmp_path))
    assert lines_of(code, Sandbox(BOX.limits, read_only=nested, import_path=paths)) == ["ab"]


NAMES = {  # of the calls that are denied
    *("ptrace", "mount", "umount2", "pivot_root", "chroot", "swapon", "reboot", "init_module", "add_key"),
    *("request_key", "keyctl", "unshare", "setns", "process_vm_readv", "process_vm_writev", "kcmp", "finit_module"),
    *("open_by_handle_at", "perf_event_open", "bpf", "userfaultfd", "kexec_load", "kexec_file_load", "io_uring_setup"),
    *("io_uring_enter", "io_uring_register", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("shmget", "semget", "msgget", "mq_open", "memfd_create", "memfd_secret", "vmsplice", "landlock_create_ruleset"),
    *("socket", "setsockopt", "inotify_init1", "fanotify_init", "inotify_init"),
}
OLD = {  # of those below 424, from which on both architectures number alike, in the order of their names
    "x86_64": "248 321 161 300 313 175 253 294 312 320 246 250 319 165 240 68 304 298 "
    "155 310 311 101 169 249 64 308 54 29 41 167 166 272 323 278",
    "aarch64": "217 280 51 262 273 105 26 272 294 104 219 279 40 180 186 265 241 "
    "41 270 271 117 142 218 190 268 208 194 198 224 39 97 282 75",
}
NEW = {*range(425, 434), 444, 447}
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HOARDS = {
    "x86_64": "29 54 64 68 240 253 278 294 300 319",
    "aarch64": "26 75 180 186 190 194 208 262 279",
}  # of OLD
SOCKET = {"x86_64": 41, "aarch64": 198}
SOCKETPAIR, FCNTL = {"x86_64": 53, "aarch64": 199}, {"x86_64": 72, "aarch64": 25}
MMAP, CLONE = {"x86_64": 9, "aarch64": 222}, {"x86_64": 56, "aarch64": 220}
ALLOWED, EPERM, ENOSYS, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def verdict(program, number, architecture, *arguments):
    """Run a seccomp program as the kernel does; struct seccomp_data: number, architecture, address, arguments."""
    number = number if number < 2**31 else number - 2**32
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    at, accumulator = 0, 0
    while True:
        code, true, false, constant = program[at]
        at += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif code == 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
            at += true if accumulator == constant else false
        elif code == 0x35:  # BPF_JMP | BPF_JGE | BPF_K
            at += true if accumulator >= constant else false
        elif code == 0x45:  # BPF_JMP | BPF_JSET | BPF_K
            at += true if accumulator & constant else false
        elif code == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            accumulator &= constant
        else:
            assert code == 0x06  # BPF_RET | BPF_K
            return constant


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_these_system_calls_and_no_others(machine):
    program, own = child._filter(machine), ARCHITECTURE[machine]
    denied = {number for number in range(600) if verdict(program, number, own) == EPERM}
    expected = {int(number) for number in OLD[machine].split()} | NEW
    assert denied == expected | {SOCKETPAIR[machine]}  # of family 0
    assert {verdict(program, number, own) for number in {*range(600)} - denied} == {ALLOWED}
    asked = [(1, 1), (1, 0x80801), (1, 2), (1, 5), (2, 1), (30, 1)]  # family and kind
    pairs = [pair for pair in asked if verdict(program, SOCKETPAIR[machine], own, *pair) == ALLOWED]
    assert pairs == [(1, 1), (1, 0x80801)]
    assert [verdict(program, FCNTL[machine], own, 3, asked) for asked in (3, 1031, 1032)] == [ALLOWED, EPERM, ALLOWED]
    shared = {flags: verdict(program, MMAP[machine], own, 0, 1 << 20, 3, flags) for flags in (1, 0x21, 0x22, 0x23)}
    assert shared == {1: ALLOWED, 0x21: EPERM, 0x22: ALLOWED, 0x23: EPERM}
    assert verdict(program, 1, own ^ 1) == KILLED
    x32 = KILLED if machine == "x86_64" else ALLOWED
    assert {verdict(program, number, own) for number in (0x40000000, 0x40000001)} == {x32}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_agents_leaves_what_keeps_memory_and_sockets_of_the_internet(machine):
    program, own = child._filter(machine, sockets=True), ARCHITECTURE[machine]
    denied = {number for number in range(600) if verdict(program, number, own) == EPERM}
    left = {int(number) for number in HOARDS[machine].split()} | {444, 447}
    assert denied == ({int(number) for number in OLD[machine].split()} | NEW) - left
    assert verdict(program, 1, own ^ 1) == KILLED
    families = {family for family in range(64) if verdict(program, SOCKET[machine], own, family, 1) == ALLOWED}
    assert families == {2, 10}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_against_processes_leaves_threads(machine):
    program, own = child._no_processes(machine), ARCHITECTURE[machine]
    answers = {number: verdict(program, number, own, 17) for number in range(600)}  # clone: of SIGCHLD
    forks = {57, 58} if machine == "x86_64" else set()
    assert {number for number, answer in answers.items() if answer == EPERM} == forks | {CLONE[machine]}
    assert {number for number, answer in answers.items() if answer == ENOSYS} == {435}
    assert verdict(program, CLONE[machine], own, 0x3D0F00) == ALLOWED  # what pthread_create asks for


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_linux(machine):
    header = Path(HEADERS[machine])
    if not header.is_file():
        pytest.skip(f"no {header} here: install linux-libc-dev")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    numbers = [int(found[name]) for name in sorted(NAMES) if name in found or name != "inotify_init"]  # x86_64's alone
    told = [number for number in numbers if number < 424]
    assert " ".join(map(str, told)) == OLD[machine] and {*numbers} - {*told} == NEW
    assert (child._PIVOT_ROOT[machine], child._CAPSET[machine]) == (int(found["pivot_root"]), int(found["capset"]))
    for name, number in (
        ("socketpair", SOCKETPAIR),
        ("fcntl", FCNTL),
        ("mmap", MMAP),
        ("clone", CLONE),
        ("clone3", {machine: 435}),
    ):
        assert number[machine] == int(found[name])
