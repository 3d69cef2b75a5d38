"""One worker and its owner, without a process: limits, replies, what a passed limit means, how often it starts again.

Whole pools, with workers that are killed and stopped, are in tests/unit/reward and tests/fault.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_daro.errors import RewardError
from megatron_daro.worker_pool import child, pool, process
from megatron_daro.worker_pool.pool import WorkerPool
from megatron_daro.worker_pool.process import (
    Program,
    WorkerCrashError,
    WorkerMemoryError,
    WorkerProcess,
    WorkerTimeoutError,
    WorkerUnreachedError,
)

PROGRAM = Program("module", {}, "judge", "reward", "it needs 100", RewardError)


@pytest.fixture
def timers(monkeypatch):
    set_to = []
    monkeypatch.setattr(child.signal, "setitimer", lambda which, seconds: set_to.append((which, seconds)))
    return set_to


def served(answer, text, memory_mib=10**6):
    replies = io.BytesIO()
    status = child.serve(answer, io.BytesIO(text), replies, timeout_s=2.0, memory_mib=memory_mib)
    return status, replies.getvalue()


def test_each_line_has_its_reply_and_a_timer_that_ends_who_hangs(timers):
    answer = {1: {"reason": "right"}, 2: {"reason": "wrong"}}.__getitem__
    assert served(answer, b"1\n2\n") == (0, b'{"reason": "right"}\n{"reason": "wrong"}\n')
    assert timers == [(signal.ITIMER_REAL, 13.0), (signal.ITIMER_REAL, 0)] * 2


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.usefixtures("timers")
def test_a_worker_ends_after_it_took_too_much_memory(at_once):
    def answer(request):
        if at_once:
            raise MemoryError
        return {"reason": "right"}

    limit = 10**6 if at_once else 1
    assert served(answer, b"1\n2\n", limit) == (child.EXIT_MEMORY, b'{"reason": "memory"}\n')


def test_the_peak_of_memory_is_in_mib():
    now = psutil.Process().memory_info().rss / 2**20
    assert 0.5 * now < child.peak_mib() < 20 * now + 1000


def test_address_space_is_bounded_above_the_limit_and_no_core_is_left(monkeypatch):
    limits = []
    monkeypatch.setattr(child.resource, "setrlimit", lambda *given: limits.append(given))
    child.limit_resources(100)
    bound = 456 * 2**20
    assert limits == [(resource.RLIMIT_CORE, (0, 0)), (resource.RLIMIT_AS, (bound, bound))]


@pytest.mark.parametrize("fails", [0, -1])
def test_a_worker_dies_with_its_parent_and_ends_at_once_without_one(monkeypatch, fails):
    """PR_SET_PDEATHSIG is 1, PR_SET_CHILD_SUBREAPER is 36 (linux/prctl.h)."""
    calls = []
    libc = SimpleNamespace(prctl=lambda *given: calls.append(given) or fails)
    monkeypatch.setattr(child.ctypes, "CDLL", lambda name, use_errno: libc)
    if fails:
        with pytest.raises(OSError, match="PR_SET_PDEATHSIG"):
            child.die_with_parent(os.getppid())
        return
    child.die_with_parent(os.getppid())
    assert calls == [(1, signal.SIGKILL, 0, 0, 0), (36, 1, 0, 0, 0)]
    with pytest.raises(SystemExit) as ended:
        child.die_with_parent(os.getppid() + 1)
    assert ended.value.code == child.EXIT_ORPHAN


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
