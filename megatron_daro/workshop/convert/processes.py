"""Runs the tasks of a conversion in several processes, which end with this one and at Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from megatron_daro.convert.plan import Job, Plan
from megatron_daro.errors import ModelError
from megatron_daro.temporary import use_own_sockets
from megatron_daro.workshop.convert.stopping import StopFlag

_POLL_S = 0.2

R = TypeVar("R")


def results_of(
    function: Callable[..., R],
    plan: Plan,
    tasks: Sequence[tuple[Job, Path]],
    processes: int,
    tick: Callable[[], None],
) -> Generator[R, None, None]:
    """Yield the results as they come. With one process, tasks run in this one; worker processes get the plan, which
    names every tensor, once each."""
    if processes == 1 or len(tasks) < 2:
        for task in tasks:
            tick()
            yield function(plan, *task)
        return
    use_own_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_daro.workshop.convert.conversion"])
    stop = context.Event()
    pool = ProcessPoolExecutor(min(processes, len(tasks)), context, initializer=_start_worker, initargs=(stop, plan))
    try:
        with _interruptible() as interrupted:
            waiting: set[Future[R]] = {pool.submit(_call, function, task) for task in tasks}
            while waiting and not interrupted.is_set():
                done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                tick()
                for future in done:
                    yield future.result()
        if interrupted.is_set():
            raise KeyboardInterrupt
    except (BrokenProcessPool, EOFError, ConnectionError):  # the last two: the fork server is gone
        raise ModelError(
            "a conversion process, or the fork server that starts them, was killed (out of memory?); run again with "
            "fewer --processes: what is complete is kept"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a flag: an exception in the middle of the pool's own code could leave it locked."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        flag.set()
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C ends at once

    signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker:
    """What a worker process was started with."""

    stop: StopFlag | None = None
    plan: Plan | None = None


def _start_worker(stop: StopFlag, plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.stop, _Worker.plan = stop, plan


def _end_with_parent() -> None:
    """End this worker when its parent was killed, since it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(function: Callable[..., R], task: tuple[object, ...]) -> R:
    return function(_Worker.plan, *task, _Worker.stop)
