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
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_status_is_that_of_the_command(code, status):
    process = keep(python(code))
    assert process.wait(60) == status
    close_and_wait(process)


def test_command_that_cannot_be_started(tmp_path):
    process = keep([str(tmp_path / "nothing")])
    assert process.wait(60) == 127
    output = process.communicate()[0].decode()
    assert "cannot start" in output and "No such file" in output
    assert "Traceback" not in output


def test_no_command_is_a_usage_error():
    process = keep([])
    assert process.wait(60) == 2


def test_command_has_its_own_session_and_no_input():
    process = keep(python("import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '')"))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"words for nobody\n")
    process.stdin.flush()
    assert process.stdout.read().split() == [b"True", b"True"]
    assert close_and_wait(process) == 0


def test_signal_dispositions_are_those_of_a_shell():
    code = "import signal; print(*(signal.getsignal(n) == signal.SIG_DFL for n in (1, 15)))"
    process = keep(python(code))
    assert process.stdout is not None and process.stdout.read().split() == [b"True", b"True"]
    assert close_and_wait(process) == 0


@pytest.mark.parametrize("own_session", [False, True])
def test_end_of_input_ends_the_whole_tree(tmp_path, own_session):
    process = keep(tree(tmp_path / "pids", own_session=own_session), "--grace-s", "0.2")
    pids = read_pids(tmp_path / "pids")
    assert len(set(alive(pids))) == 3
    assert close_and_wait(process) == 137
    assert not alive(pids)


@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_dead_command_leaves_is_killed(tmp_path, own_session):
    process = keep(tree(tmp_path / "pids", root_code="raise SystemExit(3)\n", own_session=own_session))
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


def test_command_may_end_by_itself_within_the_grace(tmp_path):
    ready = tmp_path / "ready"
    # A signal between Python's last look and one long sleep would be seen after that sleep only.
    naps = "import os, signal, time\nsignal.signal(15, lambda *_: os._exit(5))"
    code = f"{naps}\nopen({str(ready)!r}, 'w')\nwhile True: time.sleep(0.1)"
    process = keep(python(code), "--grace-s", "60")
    eventually(ready.exists, "the handler")
    assert close_and_wait(process) == 5


def test_grace_said_on_standard_input_replaces_the_option(tmp_path):
    """With the grace of the option the wait would run into the limit of 60 s."""
    process = keep(tree(tmp_path / "pids"), "--grace-s", "500")
    pids = read_pids(tmp_path / "pids")
    assert process.stdin is not None
    process.stdin.write(b"0.1\n")
    assert close_and_wait(process) == 137
    assert not alive(pids)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_terminal_sends_does_not_end_it(tmp_path, number):
    process = keep(tree(tmp_path / "pids"), "--grace-s", "0")
    read_pids(tmp_path / "pids")
    process.send_signal(number)
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


def test_a_report_that_nobody_reads_ends_the_command():
    reader, writer = os.pipe()
    os.close(reader)
    process = keep(python(SLEEP), "--grace-s", "0.2", report=writer)
    os.close(writer)
    assert process.wait(60) in (137, 143)  # SIGTERM may meet a command that is not there yet, and has no effect then
    close_and_wait(process)


def test_the_last_grace_that_was_said_counts(tmp_path):
    process = keep(tree(tmp_path / "pids"), "--grace-s", "500")
    read_pids(tmp_path / "pids")
    assert process.stdin is not None
    process.stdin.write(b"500\n")
    process.stdin.flush()
    process.stdin.write(b"600\n0.1\n")
    assert close_and_wait(process) == 137


def test_options_may_be_left_out():
    words = [sys.executable, "-I", "-S", watchdog.__file__, *python("raise SystemExit(6)")]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 6


def test_a_signal_to_many_passes_over_those_that_are_gone():
    with subprocess.Popen(python(SLEEP)) as process:
        watchdog.signal_all([1 << 22, process.pid], signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert watchdog._parent_of(1 << 22) == 0 and watchdog._parent_of(os.getpid()) == os.getppid()


def test_descendants_of_a_tree(tmp_path):
    process = keep(tree(tmp_path / "pids"), "--grace-s", "0")
    pids = read_pids(tmp_path / "pids")
    assert sorted(watchdog.descendants(process.pid)) == sorted(pids)
    assert set(watchdog.descendants(os.getpid())) > set(pids)
    close_and_wait(process)
    assert watchdog.descendants(process.pid) == []
