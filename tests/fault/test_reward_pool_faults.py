"""Faults of the verifier pool: answers that eat time or memory, workers that die, parents that die, starts that fail.

Each test asserts that its fault really happened (counters, process ids), not only that the verdicts are right.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from heavy_cases import mostly_heavy
from worker_processes import worker_pids

from megatron_daro.errors import RewardError
from megatron_daro.reward import ScreenLimits, VerifierSpec
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Verdict
from megatron_daro.worker_pool import pool as pool_module
from megatron_daro.worker_pool import process

# The screen off: the answers must reach a worker, so that its hard limits are what stops them.
UNSCREENED = VerifierSpec(
    limits=ScreenLimits(
        max_chars=10**6,
        max_nesting=10**6,
        max_round_nesting=10**6,
        max_exponent=10**300,
        max_factorial=10**300,
        max_digits=10**6,
        max_tower=10**6,
    )
)
# Minutes of one big-integer power in C, where no Python signal handler or thread would get a turn.
SLOW = ("\\boxed{9^{9^{9^9}}}", "5 x")
GOOD = ("\\boxed{(x+1)^2}", "x^2+2x+1")
WRONG = ("\\boxed{(x+1)^3}", "x^2+2x+1")


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether a process ends (or is only a zombie of somebody else) within that time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def until(condition: Any, what: str, within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def in_thread(pool: RewardPool, pairs: list[tuple[str, str]]) -> tuple[threading.Thread, list[Any]]:
    """Score in a thread; the list receives the verdicts or the error."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.extend(pool.score(pairs))
        except RewardError as error:
            result.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, result


PATHOLOGICAL = ["9^{9^{9^9}}", "x+3^{3^{3^{3^3}}}", "x+" + "{" * 3000 + "5" + "}" * 3000]


@pytest.mark.parametrize("answer", mostly_heavy(PATHOLOGICAL, "9^{9^{9^9}}"))
def test_a_pathological_answer_times_out_and_the_others_come_right(answer: str) -> None:
    with RewardPool(UNSCREENED, workers=2, timeout_s=4.0) as pool:
        pids = worker_pids()
        assert len(pids) == 2
        pairs = [GOOD, (f"\\boxed{{{answer}}}", "5 x"), *[(f"\\boxed{{y+{i}}}", "y+3") for i in range(8)], WRONG]
        verdicts = pool.score(pairs)
        assert verdicts[1] == Verdict(False, 0.0, "timeout")
        others = ["match", *["match" if i == 3 else "no_match" for i in range(8)], "no_match"]
        assert [v.reason for v in verdicts[:1] + verdicts[2:]] == others
        assert pool.counters["timeouts"] == 1
        until(lambda: pool.counters["restarts"] == 1, "the killed worker is replaced")
        assert len(pids - worker_pids()) == 1


def test_other_answers_are_done_before_a_pathological_one_times_out() -> None:
    with RewardPool(UNSCREENED, workers=2, timeout_s=60.0) as pool:
        thread, _ = in_thread(pool, [SLOW])
        pool.score([GOOD])
        verdicts = pool.score([(f"\\boxed{{y+{i}}}", "y+3") for i in range(20)])
        assert sum(v.correct for v in verdicts) == 1
        assert thread.is_alive()
        assert pool.counters["timeouts"] == 0
        pool.close()
        thread.join(30)


MATRIX_ROWS = " \\\\ ".join([" & ".join(["x+1"] * 30)] * 300)


@pytest.mark.parametrize(
    "hungry",
    [
        pytest.param((f"\\boxed{{\\begin{{pmatrix}} {MATRIX_ROWS} \\end{{pmatrix}}}}", "y^2"), id="many-objects"),
        pytest.param(SLOW, id="one-integer-that-grows-and-never-returns", marks=pytest.mark.heavy),
    ],
)
def test_an_answer_that_eats_memory_is_refused_and_its_worker_replaced(hungry: tuple[str, str]) -> None:
    with RewardPool(UNSCREENED, workers=1):
        (pid,) = worker_pids()
        status = Path(f"/proc/{pid}/status").read_text()
    base_mib = int(status.split("VmHWM:")[1].split()[0]) // 1024
    with RewardPool(UNSCREENED, workers=1, timeout_s=120.0, memory_mib=base_mib + 12) as pool:
        first = worker_pids()
        assert [v.reason for v in pool.score([hungry, WRONG])] == ["memory", "no_match"]
        assert pool.counters["memory_kills"] == 1
        assert pool.counters["timeouts"] == 0
        assert pool.counters["crashes"] == 0, "the next answer met a worker that had ended"
        assert worker_pids() != first


def test_a_worker_killed_once_costs_nothing() -> None:
    with RewardPool("math", workers=1, timeout_s=60.0) as pool:
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGSTOP)
        thread, result = in_thread(pool, [GOOD])
        os.kill(pid, signal.SIGKILL)
        thread.join(90)
        assert result == [Verdict(True, 1.0, "match")]
        assert pool.counters["crashes"] == 1
        assert pool.counters["restarts"] == 1


def test_a_worker_stopped_while_idle_costs_no_verdict() -> None:
    with RewardPool("math", workers=1, timeout_s=2.0) as pool:
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "a stopped worker")
        assert [v.reason for v in pool.score([GOOD, WRONG])] == ["match", "no_match"]
        assert (pool.counters["asked_again"], pool.counters["timeouts"]) == (1, 0)
        assert gone(pid)


def test_a_worker_stopped_in_the_middle_of_an_answer_is_no_timeout() -> None:
    with RewardPool(UNSCREENED, workers=1, timeout_s=3.0) as pool:
        (pid,) = worker_pids()
        before_s = sum(psutil.Process(pid).cpu_times()[:2])
        thread, result = in_thread(pool, [SLOW])
        until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) > before_s + 0.2, "a worker that has begun")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: pool.counters["asked_again"] == 1, "the answer is given to another worker")
        assert pool.counters["timeouts"] == 0
        thread.join(90)
        assert result == [Verdict(False, 0.0, "timeout")]


def test_a_worker_stopped_while_it_starts_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.send_signal(signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(process, "START_TIMEOUT_S", 1.0)
        patch.setattr(subprocess, "Popen", Stopped)
        with pytest.raises(RewardError, match="could not start"):
            RewardPool("math", workers=1).start()


def test_an_answer_that_no_worker_ever_takes_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    start = RewardPool._new_worker
    stopped: list[int] = []

    def stopped_worker(*args: Any, **options: Any) -> Any:
        worker = start(*args, **options)
        (pid,) = worker_pids().difference(stopped)
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)
        return worker

    with monkeypatch.context() as patch:
        patch.setattr(RewardPool, "_new_worker", stopped_worker)
        pool = RewardPool("math", workers=1, timeout_s=1.0)
        assert pool.score([GOOD]) == [Verdict(False, 0.0, "unreached")]
        assert len(stopped) >= 3
        assert (pool.counters["asked_again"], pool.counters["timeouts"]) == (2, 0)
    pool.close()
    assert all(gone(pid) for pid in stopped)


def test_an_answer_that_kills_two_workers_is_a_crash_and_the_pool_goes_on() -> None:
    with RewardPool(UNSCREENED, workers=1, timeout_s=120.0) as pool:
        (first,) = worker_pids()
        thread, result = in_thread(pool, [SLOW])
        os.kill(first, signal.SIGSEGV)
        until(lambda: pool.counters["restarts"] == 1, "a second worker")
        (second,) = worker_pids()
        os.kill(second, signal.SIGKILL)
        thread.join(90)
        assert result == [Verdict(False, 0.0, "crash")]
        assert pool.counters["crashes"] == 2
        assert pool.score([GOOD])[0].correct


def test_ctrl_c_in_the_terminal_does_not_reach_the_workers() -> None:
    with RewardPool("math", workers=1, timeout_s=60.0) as pool:
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGINT)
        assert pool.score([GOOD])[0].correct
        assert pool.counters["crashes"] == 0


@pytest.mark.parametrize("busy", [False, True])
def test_close_leaves_no_process_behind(busy: bool) -> None:
    pool = RewardPool(UNSCREENED, workers=2, timeout_s=120.0)
    pool.start()
    pids = worker_pids()
    assert len(pids) == 2
    thread, result = in_thread(pool, [SLOW] if busy else [GOOD])
    if busy:
        until(lambda: max(sum(psutil.Process(p).cpu_times()[:2]) for p in pids) > 0.1, "a busy worker")
    else:
        thread.join(60)
    pool.close()
    thread.join(30)
    assert all(gone(pid, 1.0) for pid in pids)
    assert isinstance(result[0], RewardError if busy else Verdict)
    with pytest.raises(RewardError, match="closed"):
        pool.score([GOOD])


PARENT = """
import sys, threading, time
sys.path[:0] = {path!r}
import psutil
from megatron_daro.reward import ScreenLimits, VerifierSpec
from megatron_daro.reward.pool import RewardPool
pool = RewardPool(VerifierSpec(limits=ScreenLimits(max_exponent=10**300, max_tower=10**6)), workers=2, timeout_s=300.0)
pool.start()
if {busy}:
    threading.Thread(target=pool.score, args=([("\\\\boxed{{9^{{9^{{9^9}}}}}}", "5 x")],), daemon=True).start()
print(*(child.pid for child in psutil.Process().children()), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("busy", mostly_heavy([False, True], True))
def test_workers_die_when_their_parent_is_killed(busy: bool) -> None:
    code = PARENT.format(path=sys.path, busy=busy)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        if busy:
            # 3 s of work: longer than loading and warming up take, so a worker is inside the endless power.
            started = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
            until(
                lambda: any(
                    sum(psutil.Process(pid).cpu_times()[:2]) > begin + 1.0
                    for pid, begin in zip(pids, started, strict=True)
                ),
                "a busy worker",
            )
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait(30)
        if parent.stdout is not None:
            parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_a_pool_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardError, match="memory_mib"):
        RewardPool("math", workers=1, memory_mib=20).start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="could not start"):
        RewardPool("math", workers=2).score([GOOD])


def test_workers_that_no_longer_start_end_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardPool("math", workers=1, timeout_s=60.0) as pool:
        (pid,) = worker_pids()
        monkeypatch.setattr(sys, "executable", "/bin/false")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="could not start"):
            pool.score([GOOD, WRONG])
        with pytest.raises(RewardError):
            pool.score([GOOD])


class KilledAsTheyStart:
    """Ends the first `number` processes with SIGKILL before they can be ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.pids: list[int] = []
        faults = self

        class Killed(subprocess.Popen[bytes]):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                if len(faults.pids) < number:
                    faults.pids.append(self.pid)
                    self.kill()

        monkeypatch.setattr(subprocess, "Popen", Killed)


def test_workers_killed_while_the_pool_starts_are_started_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = KilledAsTheyStart(monkeypatch, 5)
    with RewardPool("math", workers=2, timeout_s=60.0) as pool:
        assert len(faults.pids) == 5 and not set(faults.pids) & worker_pids()
        assert pool.failed_starts == 5
        assert pool.score([GOOD, WRONG]) == [Verdict(True, 1.0, "match"), Verdict(False, 0.0, "no_match")]


def test_replacements_killed_while_they_start_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardPool("math", workers=1, timeout_s=60.0) as pool:
        (pid,) = worker_pids()
        faults = KilledAsTheyStart(monkeypatch, 5)
        os.kill(pid, signal.SIGKILL)
        assert pool.score([GOOD])[0].correct
        assert len(faults.pids) == 5
        assert (pool.failed_starts, pool.counters["restarts"]) == (5, 1)


def test_workers_that_are_killed_again_and_again_end_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_LONGEST_PAUSE_S", 0.01)
    faults = KilledAsTheyStart(monkeypatch, 1000)
    with pytest.raises(RewardError, match=r"could not start .*exit status -9"):
        RewardPool("math", workers=1).start()
    assert len(faults.pids) == 10
