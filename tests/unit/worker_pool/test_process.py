"""One worker seen by its owner: what a passed limit means. Workers that are killed, stopped or too large are in
tests/fault."""

from __future__ import annotations

import os
import signal

import pytest
from worker_processes import worker_pids
from worker_program import PROGRAM

from megatron_daro.worker_pool import process
from megatron_daro.worker_pool.process import (
    WorkerCrashError,
    WorkerProcess,
    WorkerTimeoutError,
    WorkerUnreachedError,
)


@pytest.fixture
def worker():
    one = WorkerProcess(PROGRAM, timeout_s=0.4, memory_mib=512)
    one.start()
    yield one
    one.kill()


def test_who_got_no_cpu_is_waited_for_up_to_three_times_the_limit(worker, monkeypatch):
    """It was the machine that was slow, not the answer."""
    monkeypatch.setattr(process, "activity", lambda pid: ("R", 0.0))
    assert worker.ask({"sleeps_s": 0.6}) == {"reason": "right"}
    with pytest.raises(WorkerTimeoutError):
        worker.ask({"sleeps_s": 60})


def test_who_waits_for_something_else_than_the_cpu_is_not_waited_for(worker):
    with pytest.raises(WorkerTimeoutError):
        worker.ask({"sleeps_s": 0.8})


def test_who_worked_up_to_the_limit_is_not_waited_for(worker):
    assert worker.ask({"works_s": 0.05}) == {"reason": "right"}
    with pytest.raises(WorkerTimeoutError):
        worker.ask({"works_s": 60})


def test_a_request_may_be_larger_than_a_pipe_and_a_stopped_worker_that_takes_none_holds_nobody(worker):
    text = "x" * 10**6
    assert worker.ask({"says": text}) == {"reason": text}
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerUnreachedError):
        worker.ask({"says": text})


def test_who_closes_the_pool_is_not_waited_for(worker):
    with pytest.raises(WorkerCrashError):
        worker.ask({"sleeps_s": 60}, lambda: True)
