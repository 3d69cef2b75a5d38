"""What a worker does in its own process: replies line by line, limits of time and memory, its end without a parent."""

from __future__ import annotations

import io
import os
import resource
import signal
from types import SimpleNamespace

import psutil
import pytest

from megatron_daro.worker_pool import child


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
