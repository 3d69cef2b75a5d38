"""The sandbox against code that wants out: network, files, processes, memory, output, time, its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sandboxed

from megatron_daro import sandbox
from megatron_daro.errors import SandboxError
from megatron_daro.process_tree import descendants
from megatron_daro.sandbox import Limits, Sandbox, child

pytestmark = pytest.mark.slow

BOX = Sandbox(Limits(wall_s=20.0, cpu_s=10, memory_mib=128, output_bytes=4096, file_mib=4, processes=6))
QUICK = Sandbox(Limits(wall_s=1.5, cpu_s=10, memory_mib=128))


@pytest.fixture(scope="module", autouse=True)
def _isolated():
    sandboxed.require(BOX)


def run(code, box=BOX, **options):
    before = {*sandboxed.processes(os.getpid())}
    outcome = box.run(code, **options)
    assert {*sandboxed.processes(os.getpid())} <= before, "nothing of it lives on"
    return outcome


def test_what_it_printed_and_how_it_ended():
    outcome = run("import sys\nprint(input() + open('data').read())\nsys.exit(3)", stdin="a\n", files={"data": "b"})
    assert (outcome.output, outcome.reason, outcome.status) == ("ab\n", "error", 3)
    outcome = run("import sys; sys.stderr.write('x'); print(sys.argv[1:])", arguments=["1"])
    assert outcome.output == "x['1']\n" and outcome.reason == "ok" and outcome.cpu_s > 0
    assert run("import os; os.kill(os.getpid(), 11)").reason == "killed"
    assert "SyntaxError" in run("print(").output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import socket\nsocket.create_connection(('1.1.1.1', 53), 2)", "Operation not permitted"),
        ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)", "Operation not permitted"),
        ("open('/etc/shadow')", "No such file"),
        ("open(HOME)", "No such file"),
        ("open('/x', 'w')", "Read-only file system"),
        ("import os\nopen(os.__file__, 'w')", "Read-only file system"),
        ("open('x', 'w').write('y' * 9_000_000)", "OSError"),
        ("x = bytearray(10**9)", "MemoryError"),
        ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
        ("import os\nos.kill(PARENT, 9)", "No such process"),
        ("open('/proc/1/environ').read()", "Permission denied"),
        ("import os\nos.setuid(0)", "Invalid argument"),
        ("import os\nos.chroot('/scratch')", "Operation not permitted"),
    ],
)
def test_there_is_no_way_out(code, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"HOME": repr(str(Path(__file__))), "PARENT": str(os.getpid()), "PORT": str(server.getsockname()[1])}
        for name, value in names.items():
            code = code.replace(name, value)
        outcome = run(code)
    assert outcome.reason == "error" and words in outcome.output, outcome


def test_system_calls_that_make_namespaces_or_trace_are_denied():
    code = (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        "print(c.unshare(0x10000000), ctypes.get_errno(), c.ptrace(0, 0, 0, 0), ctypes.get_errno())\n"
        "print(c.mount(b'none', b'/scratch', b'tmpfs', 0, None), ctypes.get_errno())"
    )
    assert run(code).output == "-1 1 -1 1\n-1 1\n"
    status = run("print([l for l in open('/proc/self/status') if l[:6] in ('CapEff', 'CapBnd', 'NoNewP', 'Seccom')])")
    rights = status.output.replace("\\t", " ")
    assert rights.count(f" {0:016x}") == 2 and "NoNewPrivs: 1" in rights and "Seccomp: 2" in rights


def test_its_init_and_its_neighbours_are_out_of_reach():
    code = "import os\nos.kill(1, 9)\nprint(os.getppid(), sorted(i for i in os.listdir('/proc') if i.isdigit()))"
    assert run(code).output == "1 ['1', '2']\n"
    run("import os\nos.kill(-1, 9)")


@pytest.mark.parametrize(
    ("code", "reason", "box"),
    [
        ("while True: pass", "time", QUICK),
        ("import time\ntime.sleep(100)", "time", QUICK),
        ("import os, time\nos.fork()\nos.setsid() if os.getpid() != 2 else 0\ntime.sleep(100)", "time", QUICK),
        ("for _ in range(100): print('x' * 1_000_000)", "output", BOX),
        ("while True: print('y' * 1000)", "output", BOX),
        ("while True: pass", "cpu", Sandbox(Limits(wall_s=20.0, cpu_s=1))),
        (
            "import os, time\nfor i in 1, 2, 3, 4:\n  if os.fork() == 0: break\nx = b'1' * 60_000_000\ntime.sleep(100)",
            "memory",
            BOX,
        ),
    ],
)
def test_a_limit_ends_it(code, reason, box):
    outcome = run(code, box)
    assert outcome.reason == reason, outcome
    assert len(outcome.output.encode()) <= box.limits.output_bytes


HOARDS = {
    "memfd": "fd = os.memfd_create('x')\nfor _ in range(300): os.write(fd, MIB)",
    "System V": (
        "for _ in range(5):\n"
        "  at = c.shmat(c.shmget(0, 60 << 20, 0o1600), None, 0)\n"
        "  ctypes.memset(at, 1, 60 << 20)\n  c.shmdt(ctypes.c_void_p(at))"
    ),
    "unmapped in part": (
        "all = []\nfor _ in range(5):\n  all.append(mmap.mmap(-1, 60 << 20))\n"
        "  for _ in range(60): all[-1].write(MIB)\n  all[-1].resize(4096)"
    ),
    "/dev/zero": (
        "all = []\nfor _ in range(5):\n  all.append(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 60 << 20))\n"
        "  for _ in range(60): all[-1].write(MIB)\n"
        "  c.munmap(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(all[-1])) + 4096), (60 << 20) - 4096)"
    ),
    "files without a byte": "for i in range(300_000): os.close(os.open(str(i), os.O_CREAT))",
}


@pytest.mark.parametrize("hoard", HOARDS)
def test_memory_that_no_process_has_mapped_is_not_to_be_had(hoard):
    """300 MiB of it, where 128 are allowed."""
    begin = (
        "import ctypes, mmap, os\nMIB = b'1' * (1 << 20)\nc = ctypes.CDLL(None)\n"
        "c.shmat.restype = ctypes.c_void_p\nc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]\n"
        "c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
    )
    outcome = run(f"{begin}{HOARDS[hoard]}\nprint('held')", replace(BOX, limits=replace(BOX.limits, file_mib=512)))
    assert "held" not in outcome.output, outcome


FILL = """
import array, ctypes, fcntl, os, socket
held = 0
def fill(write):
    global held
    try:
        while True: held += write(b'x' * (1 << 16))
    except BlockingIOError: pass
"""
KERNELS = {
    "buffers of pairs of sockets": (
        "all = []\nwhile True:\n  pair = socket.socketpair()\n  all.append(pair)\n  for one in pair:\n"
        "    one.setblocking(False)\n    try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 28)\n"
        "    except PermissionError: pass\n    fill(one.send)"
    ),
    "a socket and what was sent to it": (
        "server = socket.socket(socket.AF_UNIX)\nserver.bind('s')\nserver.listen(4096)\nfor _ in range(300):\n"
        "  with socket.socket(socket.AF_UNIX) as one:\n    one.connect('s')\n    one.setblocking(False)\n"
        "    fill(one.send)"
    ),
    "datagrams": (
        "all = []\nwhile True:\n  to, by = socket.socketpair(type=socket.SOCK_DGRAM)\n  all.append(to)\n"
        "  to.bind('')\n  by.setblocking(False)\n  fill(by.send)"
    ),
    "buffers of pipes": (
        "while True:\n  read, write = os.pipe()\n  os.set_blocking(write, False)\n"
        "  try: fcntl.fcntl(write, 1031, 1 << 20)\n  except PermissionError: pass\n"
        "  fill(lambda data: os.write(write, data))\n  os.close(write)"
    ),
    "on their way through sockets": (
        "by, to = socket.socketpair()\nwhile True:\n  pair = socket.socketpair()\n  for one in pair:\n"
        "    one.setblocking(False)\n    fill(one.send)\n"
        "  socket.send_fds(by, [b'x'], [one.fileno() for one in pair])\n  [one.close() for one in pair]"
    ),
    "inotify": (
        "c = ctypes.CDLL(None, use_errno=True)\nfd = c.inotify_init1(0)\n"
        "while c.inotify_add_watch(fd, b'.', 1) >= 0 and held < 100 << 20: held += 1 << 20"
    ),
    "page tables": (
        "c = ctypes.CDLL(None)\nc.mmap.restype = ctypes.c_void_p\n"
        "c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "for i in range(1, 30_000):\n  at = c.mmap(i << 30, 4096, 1, 0x100022, -1, 0)\n"
        "  if at != i << 30: break\n  ctypes.string_at(at, 1)\n  held += 8192"
    ),
}


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
@pytest.mark.parametrize("kept", KERNELS)
def test_what_the_kernel_keeps_for_one_process_is_counted_or_little(kept, isolation):
    code = [f"{FILL}try:", *(f"  {line}" for line in KERNELS[kept].splitlines()), "except OSError: pass"]
    code.append("print(held)\nimport time\ntime.sleep(0.2)")
    outcome = run("\n".join(code), replace(BOX, isolation=isolation))
    assert outcome.reason == "memory" or int(outcome.output) <= 20 << 20, outcome


def test_asyncio_and_pipes_of_multiprocessing_work():
    code = (
        "import asyncio, multiprocessing\nprint(asyncio.run(asyncio.sleep(0, 7)))\n"
        "one, other = multiprocessing.Pipe()\none.send(8)\nprint(other.recv())"
    )
    assert run(code).output == run(code, replace(BOX, isolation="limits")).output == "7\n8\n"


def test_a_process_that_it_leaves_behind_ends_with_it():
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(100)\nprint('left')"
    started = time.monotonic()
    assert run(code).output == "left\n"
    assert time.monotonic() - started < 90, "it waited for the process"


HELPER, INIT, CODE = 0, 1, 2  # places in the line of a run's processes; the first two are the sandbox's own


def kill_runs(place, times, go, over=lambda: False, lines=None):
    """A thread that sends SIGKILL to that process of the next runs, once their code has begun; then it makes `go`. It
    may take what is just ending for a run: `over` says when enough were killed. lines: gets the processes of each."""
    killed = []

    def kill():
        while len(killed) < times and not over():
            line = sandboxed.processes(os.getpid())
            if len(line) == 3 and line[0] not in killed:
                killed.append(line[0])
                if lines is not None:
                    lines.extend(line)
                os.kill(line[place], signal.SIGKILL)
            time.sleep(0.01)
        go.touch()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def waiting(tmp_path):
    """A sandbox, code that goes on when a file is there, and that file."""
    tmp_path.chmod(0o755)
    go = tmp_path / "go"
    code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('done')"
    return replace(BOX, read_only=(str(tmp_path),)), code, go


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
@pytest.mark.parametrize("place", [CODE, INIT, HELPER])
def test_what_was_killed_from_outside_is_run_again(waiting, place, isolation):
    (box, code, go), of_the_killed = waiting, []
    thread = kill_runs(place, 1, go, lines=of_the_killed)
    outcome = run(code, replace(box, isolation=isolation))
    thread.join(10)
    assert (outcome.output, outcome.reason) == ("done\n", "ok")
    assert not alive(of_the_killed)


def alive(pids):
    """Those that are neither gone nor waiting for their parent to look."""
    states = {}
    for pid in pids:
        with suppress(OSError):
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return [pid for pid, state in states.items() if state not in "ZX"]


def test_code_that_kills_itself_is_killed_and_a_sandbox_that_never_lives_is_an_error(waiting):
    assert run("import os\nos.kill(os.getpid(), 9)").status == -signal.SIGKILL
    box, code, go = waiting
    over = threading.Event()
    thread = kill_runs(HELPER, 100, go, over.is_set)
    with pytest.raises(SandboxError, match="killed"):
        run(code, box)
    over.set()
    thread.join(10)


def test_isolation_that_is_not_to_be_had_is_refused_by_name():
    """Inside of a sandbox the kernel makes no namespaces for another one."""
    outside = Path(sandbox.__file__).parents[2]
    code = "from megatron_daro.sandbox import Sandbox\nSandbox().run('print(1)')"
    limits = Limits(wall_s=20.0, memory_mib=512, processes=16)
    outcome = run(code, Sandbox(limits, read_only=(str(outside / "megatron_daro"),), import_path=(str(outside),)))
    said = outcome.output.splitlines()[-1]
    assert "SandboxError" in said and "namespaces" in said and "unshare" in said, outcome


def test_what_is_mounted_elsewhere_does_not_matter(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    script = 'mkdir "$1" && mount -t tmpfs tmpfs "$1" && exec "$2" -c "$3"'
    code = "from megatron_daro.sandbox import Sandbox; print(Sandbox().run('print(1)').output)"
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path / "mounted"), sys.executable, code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "1\n\n", ended.stderr


def test_weaker_isolation_is_another_word_and_has_the_limits():
    weak = Sandbox(BOX.limits, isolation="limits")
    assert run("print(open('/etc/passwd').read()[:5])", weak).output.strip()  # the machine's files are in sight
    assert "Operation not permitted" in run("import socket\nsocket.socket()", weak).output
    assert "MemoryError" in run("x = bytearray(10**9)", weak).output
    threads = (
        "import threading\nthreads = [threading.Thread(target=print) for _ in '123']\n[t.start() for t in threads]"
    )
    assert run(threads, weak).output == "\n" * 3
    for start in ("os.fork()", "subprocess.run(['/bin/true'])", "multiprocessing.Process(target=print).start()"):
        assert "Operation not permitted" in run(f"import multiprocessing, os, subprocess\n{start}", weak).output
    assert run("while True: pass", replace(weak, limits=QUICK.limits)).reason == "time"


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        *[({name: ""}, {}) for name in ("../x", "", ".", "..", "a\0b")],
        *[({}, {name: 0}) for name in ("wall_s", "cpu_s", "memory_mib", "output_bytes", "file_mib", "processes")],
        ({}, {"wall_s": -1}),
    ],
)
def test_what_makes_no_sense_is_refused(files, limits):
    with pytest.raises(SandboxError, match=r"got .*allowed"):
        Sandbox(Limits(**limits)).run("print(1)", files=files)


def test_code_that_kills_itself_is_run_once_again_and_no_more(tmp_path):
    runs = tmp_path / "runs"
    code = f"import os\nopen({str(runs)!r}, 'a').write('x')\nos.kill(os.getpid(), 9)"
    assert run(code, Sandbox(isolation="limits")).reason == "killed"
    assert runs.read_text() == "xx"


def test_limits_in_which_python_cannot_run_are_named_by_the_check():
    with pytest.raises(SandboxError, match="memory_mib is 1"):
        Sandbox(Limits(memory_mib=1)).check()


def test_output_that_is_no_text_and_files_that_are_none_are_written_another_way():
    assert run("import sys\nsys.stdout.buffer.write(b'a\\xff')").output == "a\N{REPLACEMENT CHARACTER}"
    assert run("print(open('data').read())", files={"data": "\udcff"}).output == "\\udcff\n"


def test_output_may_be_as_long_as_the_limit():
    box = Sandbox(Limits(output_bytes=100))
    assert run("print('x' * 99)", box).reason == "ok"
    outcome = run("print('x' * 100)", box)
    assert outcome.reason == "output" and outcome.output == "x" * 100 and outcome.status is None


def test_the_time_that_code_may_take_counts_from_where_it_begins(monkeypatch, tmp_path):
    """The clock leaps when the code has begun: over the limit of a start, not over that of the code."""
    begun = tmp_path / "begun"
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if begun.exists() else 0.0)
    monkeypatch.setattr(sandbox, "time", clock)
    code = f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(0.1)\nprint('done')"
    outcome = run(code, Sandbox(Limits(wall_s=2000.0), isolation="limits"))
    assert (outcome.output, outcome.reason) == ("done\n", "ok")


def test_the_time_of_the_processor_is_that_of_the_code_and_of_the_kernel_for_it():
    code = (
        "import os\nzero = os.open('/dev/urandom', os.O_RDONLY)\n"
        "while os.times().system < 0.06: os.read(zero, 1 << 20)\n"
        "while os.times().user < 0.06: pass\nprint(sum(os.times()[:2]))"
    )
    outcome = run(code)
    assert float(outcome.output) - 0.02 <= outcome.cpu_s < float(outcome.output) + 0.1


def test_its_own_processes_have_nothing_of_ours_and_nothing_is_left_open(waiting):
    box, code, go = waiting
    seen, before = [], len([*Path("/proc/self/fd").iterdir()])

    def look():
        while len(line := sandboxed.processes(os.getpid())) < 3:
            time.sleep(0.01)
        helper = Path(f"/proc/{line[HELPER]}")
        seen.append(((helper / "environ").read_bytes(), str((helper / "cwd").readlink()), os.getsid(line[HELPER])))
        seen.append(line[HELPER])
        go.touch()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert run(code, box).output == "done\n"
    thread.join(10)
    assert seen == [(b"", "/", seen[1]), seen[1]]
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def runs(isolation):
    """Code that waits for other code."""
    return f"Sandbox(isolation={isolation!r}).run('import time; time.sleep(100)')"


def outlived_by(code):
    """Kill an interpreter as soon as the code of its sandbox is started, and return what lives on."""
    owner = subprocess.Popen([sys.executable, "-c", code])
    while len(line := descendants(owner.pid)) < 3 and owner.poll() is None:
        time.sleep(0.01)
    owner.kill()
    owner.wait()
    assert len(line) == 3
    deadline = time.monotonic() + 30
    while alive(line) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive(line)


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_a_run_ends_with_whoever_waits_for_it(isolation):
    assert outlived_by(f"from megatron_daro.sandbox import Sandbox\n{runs(isolation)}") == []


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_so_does_one_that_has_not_asked_the_kernel_for_it_yet(isolation, tmp_path):
    """Each process asks for the end of its parent to be its own; here the parent has ended before it asks."""
    late = [
        "import sys, time",
        f"sys.path.append({str(Path(child.__file__).parent)!r})",
        "import child",
        "asked = child.prctl",
        "def late(option, value=0):",
        "    time.sleep(0.5 if option == child._SET_PDEATHSIG else 0)",
        "    asked(option, value)",
        "child.prctl = late",
        "sys.exit(child.main(int(sys.argv[1])))",
    ]
    (tmp_path / "child.py").write_text("\n".join(late))
    lines = [
        "from pathlib import Path",
        "from megatron_daro import sandbox",
        "from megatron_daro.sandbox import Sandbox",
    ]
    changed = f"sandbox._CHILD = Path({str(tmp_path)!r}, 'child.py')"
    assert outlived_by("\n".join([*lines, changed, runs(isolation)])) == []


def test_nothing_begins_for_a_parent_that_is_gone():
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", child.__file__, str(writer)]
    ended = subprocess.run(command, input=json.dumps({"parent": -1}), pass_fds=[writer], text=True, check=False)
    os.close(writer)
    with os.fdopen(reader) as reports:
        assert (ended.returncode, reports.read()) == (1, "")
