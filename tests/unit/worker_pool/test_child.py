"""What a worker does in its own process: replies line by line, its end after too much memory or without a parent."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace

import pytest

from megatron_daro.worker_pool import child


def served(answer, text, memory_mib=10**6):
    replies = io.BytesIO()
    status = child.serve(answer, io.BytesIO(text), replies, timeout_s=20.0, memory_mib=memory_mib)
    return status, replies.getvalue()


def test_each_line_has_its_reply():
    answer = {1: {"reason": "right"}, 2: {"reason": "wrong"}}.__getitem__
    assert served(answer, b"1\n2\n") == (0, b'{"reason": "right"}\n{"reason": "wrong"}\n')


@pytest.mark.parametrize("at_once", [True, False])
def test_a_worker_ends_after_it_took_too_much_memory(at_once):
    def answer(request):
        if at_once:
            raise MemoryError
        return {"reason": "right"}

    limit = 10**6 if at_once else 1
    assert served(answer, b"1\n2\n", limit) == (child.EXIT_MEMORY, b'{"reason": "memory"}\n')


def test_a_worker_whose_parent_ended_before_it_asked_to_die_with_it_ends_at_once(monkeypatch):
    monkeypatch.setattr(child.ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(prctl=lambda *given: 0))
    child.die_with_parent(os.getppid())
    with pytest.raises(SystemExit):
        child.die_with_parent(os.getppid() + 1)
