"""One worker seen by its owner, over pipes without a process: replies, what it takes, what a passed limit means."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from worker_program import PROGRAM

from megatron_daro.worker_pool import process
from megatron_daro.worker_pool.process import (
    WorkerCrashError,
    WorkerMemoryError,
    WorkerProcess,
    WorkerTimeoutError,
    WorkerUnreachedError,
)


def test_what_a_process_does_and_takes_is_read_from_proc():
    own, gone = os.getpid(), 2**22 + 1
    state, cpu_s = process.activity(own)
    spent = os.times()
    assert state == "R" and cpu_s == pytest.approx(spent.user + spent.system, abs=0.5)
    assert process.activity(gone) == ("?", float("inf"))
    rss = psutil.Process().memory_info().rss / 2**20
    assert process.resident_mib(own) == pytest.approx(rss, rel=0.2) and process.resident_mib(gone) == 0.0
    assert process.memory_of_all_mib(own) >= 0.8 * rss and process.memory_of_all_mib(gone) == 0.0


def test_what_a_reader_has_not_taken_is_counted():
    reader, writer = os.pipe()
    os.write(writer, b"12345")
    assert process._unread_bytes(writer) == 5
    os.close(reader)
    os.close(writer)
    assert process._unread_bytes(writer) == 0


def test_a_worker_finds_the_parents_modules_and_has_one_thread_and_no_gpu(monkeypatch):
    monkeypatch.setattr(process.sys, "path", ["", "/some/where"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("MINE", "stays")
    found = process._environment()
    wanted = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "MINE": "stays"}
    wanted |= {"PYTHONPATH": f"{Path.cwd()}:/some/where", "SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
    assert {name: found[name] for name in wanted} == wanted


@pytest.fixture
def worker():
    """Its owner's end, and two pipes in the place of a process: the test writes replies and reads requests."""
    one = WorkerProcess(PROGRAM, timeout_s=0.05, memory_mib=10**6)
    (reply_end, own_end), (request_end, stdin) = os.pipe(), os.pipe()
    one._process = SimpleNamespace(
        pid=os.getpid(), stdout=os.fdopen(reply_end, "rb", 0), stdin=os.fdopen(stdin, "wb"), wait=lambda: 7
    )
    one.says = os.fdopen(own_end, "wb", 0)
    one.hears = os.fdopen(request_end, "rb", 0)
    yield one
    for stream in (one._process.stdout, one._process.stdin, one.says, one.hears):
        with contextlib.suppress(BrokenPipeError):  # of a request that nobody took
            stream.close()
    one._stderr.close()


def test_requests_are_lines_and_replies_come_one_at_a_time(worker):
    worker.says.write(b'{"reason": "right"}\n{"reason": "wro')
    assert worker.ask({"text": "a"}) == {"reason": "right"} and worker.hears.read(100) == b'{"text": "a"}\n'
    worker.says.write(b'ng"}\n')
    assert worker.ask({}) == {"reason": "wrong"}


@pytest.mark.parametrize(("says", "text"), [(b"right\n", "the reply is no JSON$"), (b"[1]\n", "no JSON object$")])
def test_what_is_no_reply_is_a_crash(worker, says, text):
    worker.says.write(says)
    with pytest.raises(WorkerCrashError, match=text):
        worker.ask({})


def test_a_worker_that_ended_is_a_crash_with_its_status(worker):
    worker.says.close()
    with pytest.raises(WorkerCrashError, match=r"^exit status 7$"):
        worker.ask({})
    worker.hears.close()
    with pytest.raises(WorkerCrashError, match="Broken pipe"):
        worker.ask({})


def test_who_closes_the_pool_or_takes_too_much_memory_is_not_waited_for(worker):
    with pytest.raises(WorkerCrashError, match="the pool is closing"):
        worker.ask({}, lambda: True)
    worker._memory_mib = 1
    with pytest.raises(WorkerMemoryError, match="more than 1 MiB resident"):
        worker.ask({})


def test_a_request_that_was_never_taken_says_nothing_of_the_answer(worker):
    with pytest.raises(WorkerUnreachedError, match=r"after the limit of 0.05 s"):
        worker.ask({})


def test_a_worker_that_was_not_started_cannot_be_asked():
    one = WorkerProcess(PROGRAM, timeout_s=1.0, memory_mib=1)
    assert one.pid is None
    with pytest.raises(WorkerCrashError, match="not running"):
        one.ask({})
    one.kill()
    one._stderr.write(b"x" * 700 + b" the\n  end ")
    assert one._last_words() == "x" * 589 + " the end"
    one._stderr.close()


@pytest.mark.parametrize(
    ("state", "cpu_s", "before_s", "late_s", "unread", "error"),
    [
        ("T", 99.0, None, 0.0, 0, WorkerUnreachedError),
        ("t", 99.0, None, 0.0, 0, WorkerUnreachedError),
        ("S", 99.0, None, 0.0, 1, WorkerUnreachedError),
        ("R", 5.0, None, 0.0, 0, WorkerTimeoutError),  # half of the limit: it worked
        ("R", 4.9, None, 20.0, 0, None),
        ("R", 6.9, 2.0, 20.0, 0, None),
        ("R", 7.0, 2.0, 0.0, 0, WorkerTimeoutError),
        ("R", 0.0, None, 20.1, 0, WorkerTimeoutError),  # three times the limit
    ],
)
def test_who_got_no_cpu_is_waited_for_and_who_worked_is_not(
    worker, monkeypatch, state, cpu_s, before_s, late_s, unread, error
):
    monkeypatch.setattr(process, "activity", lambda pid: (state, cpu_s))
    monkeypatch.setattr(process, "_unread_bytes", lambda descriptor: unread)
    if error is None:
        worker._check_overdue(10.0, late_s, before_s)
    else:
        with pytest.raises(error):
            worker._check_overdue(10.0, late_s, before_s)
