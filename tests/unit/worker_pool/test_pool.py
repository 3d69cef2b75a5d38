"""The pool over planned workers: whom it asks again, how often it starts one again, and what a closed one says.

Whole pools, with workers that are killed and stopped, are in tests/unit/reward and tests/fault.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from worker_program import PROGRAM

from megatron_daro.errors import RewardError
from megatron_daro.worker_pool import child, pool
from megatron_daro.worker_pool.pool import WorkerPool
from megatron_daro.worker_pool.process import (
    WorkerCrashError,
    WorkerMemoryError,
    WorkerTimeoutError,
    WorkerUnreachedError,
)


class Worker:
    """A worker whose replies, or errors, come from a list that all share; starts: errors of starts, and kills."""

    def __init__(self, plan):
        self.plan, self.pid, self.killed_at_start = plan, 17, False

    def start(self, stopping):
        self.plan.started.append(self)
        if self.plan.starts:
            self.killed_at_start = self.plan.starts.pop(0) == "killed"
            raise RewardError("it did not start")

    def ask(self, request, stopping):
        said = self.plan.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self):
        self.plan.killed.append(self)


@pytest.fixture
def planned(monkeypatch):
    plan = SimpleNamespace(started=[], killed=[], says=[], starts=[], pauses=[], closes=False)

    def make(program, *, timeout_s, memory_mib):
        assert (program, timeout_s, memory_mib) == (PROGRAM, 3.0, 64)
        return Worker(plan)

    monkeypatch.setattr(pool, "WorkerProcess", make)
    plan.pool = WorkerPool(PROGRAM, 1, 3.0, 64)
    plan.pool._closing.wait = lambda seconds: plan.pauses.append(seconds) or plan.closes
    return plan


def counted(plan):
    return {name: count for name, count in plan.pool.counters.items() if count}


@pytest.mark.parametrize("reason", ["right", "verifier_failed", "failed"])
def test_a_reply_keeps_its_worker(planned, reason):
    worker = Worker(planned)
    planned.says = [{"reason": reason}]
    assert planned.pool._serve(0, worker, {}) == ({"reason": reason}, worker)
    assert counted(planned) == {"judged": 1, **({} if reason == "right" else {"failures": 1})}
    assert planned.killed == []


@pytest.mark.parametrize(
    ("says", "reason", "counts", "killed"),
    [
        ([WorkerTimeoutError()], "timeout", {"judged": 1, "timeouts": 1}, 1),
        ([WorkerMemoryError()], "memory", {"judged": 1, "memory_kills": 1}, 1),
        ([WorkerCrashError()] * 2, "crash", {"crashes": 2, "restarts": 1}, 2),
        ([WorkerUnreachedError()] * 3, "unreached", {"asked_again": 2, "restarts": 2}, 3),
        (
            [WorkerUnreachedError()] * 2 + [WorkerCrashError()] + [{"reason": "memory"}],
            "memory",
            {"asked_again": 2, "restarts": 3, "crashes": 1, "judged": 1, "memory_kills": 1},
            4,
        ),
    ],
)
def test_a_request_is_tried_again_where_the_answer_is_not_to_blame_and_its_worker_goes(
    planned, says, reason, counts, killed
):
    planned.says = list(says)
    assert planned.pool._serve(0, Worker(planned), {}) == ({"reason": reason}, None)
    assert counted(planned) == counts and len(planned.killed) == killed
    assert planned.pool.worker_pids == ()


def test_a_class_that_does_not_fit_ends_the_run_with_its_own_words(planned):
    planned.says = [{"reason": child.REFUSED, "error": "return a float"}]
    with pytest.raises(RewardError, match=r"^return a float$"):
        planned.pool._serve(0, Worker(planned), {})
    assert len(planned.killed) == 1


def test_a_pool_that_closes_scores_nothing_more(planned):
    planned.pool._closing.set()
    with pytest.raises(RewardError, match=r"^judge pool: closed while an answer was being scored; close it after"):
        planned.pool._serve(0, Worker(planned), {})
    with pytest.raises(RewardError, match="already closed; make a new one"):
        planned.pool.start()


@pytest.mark.parametrize(
    ("starts", "attempts", "fails"),
    [
        (["ended"], 1, True),
        (["ended"] * 2, 3, False),
        (["ended"] * 3, 3, True),
        (["killed"] * 9, 1, False),
        (["killed"] * 10, 1, True),
    ],
)
def test_who_was_killed_at_its_start_is_started_more_often_than_who_ended(planned, starts, attempts, fails):
    planned.starts = list(starts)
    if fails:
        with pytest.raises(RewardError, match="it did not start"):
            planned.pool._new_worker(0, attempts=attempts)
    else:
        assert planned.pool._new_worker(0, attempts=attempts) is planned.started[-1]
        assert planned.pool.worker_pids == (17,)
    tried = len(starts) - fails
    assert planned.pool.failed_starts == tried and len(planned.started) == len(starts) + (not fails)
    assert planned.pauses == [min(0.1 * 2**n, 2.0) for n in range(1, tried + 1)]


def test_a_pool_that_closes_starts_nobody_again(planned):
    planned.starts, planned.closes = ["killed"], True
    with pytest.raises(RewardError, match="it did not start"):
        planned.pool._new_worker(0, attempts=3)
    assert planned.pool.failed_starts == 0 and planned.pauses == [0.2]


def test_what_waits_in_a_closed_pool_is_told_and_the_stops_stay(planned):
    futures, bound_s = planned.pool._submit([{"a": 1}, {"b": 2}])
    assert bound_s == pool.longest_wait_s(2, 1, 3.0)
    planned.pool._tasks.put(None)
    futures[0].cancel()
    planned.pool._fail_waiting(RewardError("over"))
    assert futures[0].cancelled() and str(futures[1].exception()) == "over"
    assert planned.pool._tasks.get_nowait() is None and planned.pool._tasks.empty()
    planned.pool._closing.set()
    (late,), _ = planned.pool._submit([{}])
    assert str(late.exception()) == "judge pool: closed; make a new one"
    planned.pool._broken = RewardError("broken")
    (late,), _ = planned.pool._submit([{}])
    assert str(late.exception()) == "broken"


@pytest.mark.parametrize(("timeout_s", "memory_mib"), [(0, 64), (-1.0, 64), (3.0, 0)])
def test_limits_that_cannot_work_are_refused(timeout_s, memory_mib):
    says = rf"^reward.timeout_s and reward.memory_mib: got {timeout_s} and {memory_mib}, allowed above 0"
    with pytest.raises(RewardError, match=says):
        WorkerPool(PROGRAM, 1, timeout_s, memory_mib)
