"""One worker seen by its owner: what a passed limit means. Workers that are killed, stopped or too large are in
tests/fault."""

from __future__ import annotations

import pytest
from worker_program import PROGRAM

from megatron_daro.worker_pool.process import WorkerCrashError, WorkerProcess, WorkerTimeoutError


@pytest.fixture
def worker():
    one = WorkerProcess(PROGRAM, timeout_s=0.4, memory_mib=512)
    one.start()
    yield one
    one.kill()


def test_who_got_no_cpu_is_waited_for_up_to_three_times_the_limit(worker):
    """It was the machine that was slow, not the answer."""
    assert worker.ask({"sleeps_s": 0.6}) == {"reason": "right"}
    with pytest.raises(WorkerTimeoutError):
        worker.ask({"sleeps_s": 60})


def test_who_worked_up_to_the_limit_is_not_waited_for(worker):
    assert worker.ask({"works_s": 0.05}) == {"reason": "right"}
    with pytest.raises(WorkerTimeoutError):
        worker.ask({"works_s": 60})


def test_who_closes_the_pool_is_not_waited_for(worker):
    with pytest.raises(WorkerCrashError):
        worker.ask({"sleeps_s": 60}, lambda: True)
