"""The processes of a conversion: in which order results come, and what an interrupt, a stop and a kill do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from megatron_daro.errors import ModelError
from megatron_daro.workshop.convert import conversion


def test_results_come_one_by_one_in_this_process_where_there_is_one():
    seen: list[object] = []
    each = conversion._each(
        lambda *task: seen.append(task) or task, [(1, 2, 3), (4, 5, 6)], 1, lambda: seen.append("tick")
    )
    assert next(each) == (1, 2, 3) and seen == ["tick", (1, 2, 3)] and list(each) == [(4, 5, 6)]
    seen.clear()
    assert list(conversion._each(lambda *task: task, [(1, 2, 3)], 8, lambda: seen.append("tick"))) == [(1, 2, 3)]
    assert seen == ["tick"]


@pytest.mark.parametrize("error", [conversion.BrokenProcessPool(), EOFError(), ConnectionError()])
def test_a_killed_process_is_said_and_the_others_are_ended(monkeypatch, error):
    ended: list[object] = []

    class Pool:
        def __init__(self, processes, context, *, initializer, initargs):
            ended.append(processes)
            assert initializer is conversion._start_worker
            self.stop = initargs[0]

        def submit(self, call, function, task):
            future: conversion.Future[object] = conversion.Future()
            future.set_exception(error)
            return future

        def shutdown(self, **options):
            ended.append((self.stop.is_set(), options))

    monkeypatch.setattr(conversion, "ProcessPoolExecutor", Pool)
    with pytest.raises(ModelError, match=r"was killed \(out of memory\?\); run again with fewer --processes"):
        list(conversion._each(print, [(1, 2, 3), (4, 5, 6)], 8, lambda: None))
    assert ended == [2, (True, {"wait": True, "cancel_futures": True})]


def test_the_first_interrupt_is_a_flag_and_the_second_ends():
    before = signal.getsignal(signal.SIGINT)
    with conversion._interruptible() as flag:
        assert not flag.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.wait(5) and signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before
    with conversion._interruptible():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    inner: list[object] = []

    def other_thread():
        with conversion._interruptible() as flag:
            inner.append((flag.is_set(), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert inner == [(False, True)]


def test_a_worker_hears_the_stop_and_not_the_interrupt(monkeypatch):
    before, threads, stop = signal.getsignal(signal.SIGINT), [], object()
    monkeypatch.setattr(conversion._Worker, "stop", None)
    monkeypatch.setattr(conversion.torch, "set_num_threads", threads.append)
    try:
        conversion._start_worker(stop)  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threads == [1]
        assert conversion._call(lambda *given: given, (1, 2)) == (1, 2, stop)
    finally:
        signal.signal(signal.SIGINT, before)
    ended: list[object] = []
    monkeypatch.setattr(conversion.os, "_exit", ended.append)
    conversion._end_with_parent()
    assert ended == []
    parent = SimpleNamespace(join=lambda: ended.append("joined"))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    conversion._end_with_parent()
    assert ended == ["joined", 1]
