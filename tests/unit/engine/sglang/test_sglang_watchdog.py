"""The watchdog, run as the script it is: exit statuses, and that nothing below it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_process_trees import FROZEN, SLEEP, STUBBORN, alive, eventually, python, read_pids, state, tree

from megatron_daro.engine.sglang import watchdog


def keep(
    command: list[str], *options: str, parent_pid: int | None = None, report: int | None = None
) -> subprocess.Popen[bytes]:
    told = [] if report is None else ["--report-fd", str(report)]
    words = ["--parent-pid", str(parent_pid or os.getpid()), *told, *options, "--", *command]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", watchdog.__file__, *words],
        pass_fds=() if report is None else (report,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def close_and_wait(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(60)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_status_is_that_of_the_command(code, status):
    process = keep(python(code))
    assert process.wait(60) == status
    close_and_wait(process)


def test_command_has_its_own_session_and_no_input():
    process = keep(python("import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '')"))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"words for nobody\n")
    process.stdin.flush()
    assert process.stdout.read().split() == [b"True", b"True"]
    assert close_and_wait(process) == 0


@pytest.mark.parametrize("own_session", [False, True])
def test_end_of_input_ends_the_whole_tree(tmp_path, own_session):
    process = keep(tree(tmp_path / "pids", own_session=own_session), "--grace-s", "0.2")
    pids = read_pids(tmp_path / "pids")
    assert len(set(alive(pids))) == 3
    assert close_and_wait(process) == 137
    assert not alive(pids)


def test_what_a_dead_command_leaves_is_killed(tmp_path):
    process = keep(tree(tmp_path / "pids", root_code="raise SystemExit(3)\n", own_session=True))
    pids = read_pids(tmp_path / "pids")
    assert process.wait(60) == 3
    assert not alive(pids)
    close_and_wait(process)


def test_sigterm_ends_the_tree(tmp_path):
    process = keep(tree(tmp_path / "pids"), "--grace-s", "0.2")
    pids = read_pids(tmp_path / "pids")
    process.terminate()
    assert process.wait(60) == 137
    assert not alive(pids)
    close_and_wait(process)


def test_stopped_command_is_ended():
    """SIGTERM reaches a stopped process only when it goes on; a stubborn one needs SIGKILL."""
    for code, status in ((FROZEN + SLEEP, 143), (STUBBORN + FROZEN + SLEEP, 137)):
        process = keep(python(code), "--grace-s", "1")
        found: list[int] = []
        eventually(lambda p=process, f=found: bool(f.extend(watchdog.descendants(p.pid)) or f), "the command")
        eventually(lambda f=found: state(f[0]) == "T", "the command to stop itself")
        assert close_and_wait(process) == status
        assert not alive(found)


def test_parent_that_is_gone_ends_the_command_although_input_stays_open(tmp_path):
    """Another process may hold a copy of the pipe; a parent id that is not ours looks like a parent that died."""
    process = keep(tree(tmp_path / "pids"), "--grace-s", "0.2", parent_pid=1 << 22)
    assert process.wait(60) != 0
    assert process.stdin is not None and not process.stdin.closed
    pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    assert not alive([int(pid) for pid in pids])
    close_and_wait(process)


def test_killed_watchdog_takes_the_command_with_it():
    process = keep(python(SLEEP))
    found: list[int] = []
    eventually(lambda: bool(found.extend(watchdog.descendants(process.pid)) or found), "the command")
    eventually(lambda: b"sleep" in Path(f"/proc/{found[0]}/cmdline").read_bytes().split(b"\0")[-2], "the exec")
    eventually(lambda: state(found[0]) == "S", "the command to sleep")
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    eventually(lambda: not alive(found), "the kernel to kill the command")
    close_and_wait(process)


def test_what_a_terminal_sends_does_not_end_it(tmp_path):
    process = keep(tree(tmp_path / "pids"), "--grace-s", "0")
    read_pids(tmp_path / "pids")
    process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGSTOP)  # the first is delivered before the second
    eventually(lambda: state(process.pid) in "TZ", "the watchdog to be stopped")
    os.kill(process.pid, signal.SIGCONT)
    assert state(process.pid) != "Z" and process.poll() is None
    assert close_and_wait(process) == 137


def test_the_command_ignores_no_signal_that_ends_and_has_no_file_of_the_watchdogs():
    reader, writer = os.pipe()
    process = keep(["sh", "-c", "grep SigIgn /proc/self/status; ls /proc/self/fd"], report=writer)
    os.close(writer)
    assert process.stdout is not None
    words = process.stdout.read().split()
    ended_by = sum(1 << number - 1 for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM))
    assert int(words[1], 16) & ended_by == 0
    assert words[2:] == [b"0", b"1", b"2", b"3"]  # the last is the directory that is being listed
    with os.fdopen(reader) as report:
        assert int(report.read()) != process.pid
    assert close_and_wait(process) == 0
