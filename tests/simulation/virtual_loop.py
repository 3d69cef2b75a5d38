"""An event loop with virtual time: it never waits, and the same seed gives the same schedule.

Where nothing is ready the clock jumps to the next timer. Callbacks that are ready at once run in the order in which
they became so, as asyncio promises, or, where `shuffled`, in an order drawn from the seed: what is right under both
does not rest on the order in which tasks wake up. Threads (`asyncio.to_thread`) are functions that are done at once,
before or after a drawn delay, also where whoever waits for them was cancelled meanwhile. FoundationDB's simulation
works like this.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any
from weakref import ref


class StuckError(AssertionError):
    """Nothing will ever happen again, or not before the deadline."""


class _Timer(float):
    """What runs at this time: [callback, arguments, context]; a cancelled one has no callback.

    As floats they are compared without a call of Python, which a heap does all the time.
    """

    __slots__ = ("work",)
    work: list[Any]

    def cancel(self) -> None:
        self.work[:] = None, (), None


class VirtualLoop(asyncio.BaseEventLoop):
    """One schedule. random: of everything that a schedule draws.

    Methods of asyncio's own are overridden by shorter ones without its checks: a schedule is mostly these.
    """

    get_debug = staticmethod(bool)  # False, without a call of Python: each future asks
    _ready: deque[list[Any]]  # as the work of a timer
    _scheduled: list[_Timer]

    def __init__(self, random: Random, *, deadline_s: float, shuffled: bool = False) -> None:
        super().__init__()
        self.random, self._deadline_s, self._shuffled = random, deadline_s, shuffled
        self._now, self._numbers = 0.0, count()
        self.faults: list[str] = []
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.set_exception_handler(lambda _, context: self.faults.append(repr(context)))

    def time(self) -> float:
        return self._now

    def create_task(self, coroutine: Any, *, name: Any = None, context: Any = None) -> asyncio.Task:
        return asyncio.Task(coroutine, loop=self, name=name or next(self._numbers), context=context)

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:
        """No handle: nobody cancels what runs at once."""
        self._ready.append([callback, arguments, context])

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        timer = _Timer(self._now + delay)
        timer.work = [callback, arguments, context]
        heapq.heappush(self._scheduled, timer)
        return timer

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        timer = _Timer(when)
        timer.work = [callback, arguments, context]
        heapq.heappush(self._scheduled, timer)
        return timer

    def _run_once(self) -> None:
        """All callbacks until the loop is stopped, one after the other; asyncio's own would ask a selector
        (base_events.py, 3.11)."""
        ready, timers = self._ready, self._scheduled
        while not self._stopping:
            if not ready:
                self._wait_for_timer()
            while timers and timers[0] <= self._now:
                if (work := heapq.heappop(timers).work)[0] is not None:
                    ready.append(work)
            if self._shuffled and len(ready) > 1:
                ready.rotate(-self.random.randrange(len(ready)))
            callback, arguments, context = ready.popleft()
            try:
                if context is not None:
                    context.run(callback, *arguments)
                elif callback is not None:
                    callback(*arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"in {callback}", "exception": error})

    def _wait_for_timer(self) -> None:
        """Nothing is ready: the clock jumps."""
        timers = self._scheduled
        while timers and timers[0].work[0] is None:
            heapq.heappop(timers)
        if not timers:
            raise StuckError(f"at {self._now:.3f} s everybody waits for somebody else: {self._waiting()}")
        self._now = max(self._now, float(timers[0]))
        if self._now > self._deadline_s:
            raise StuckError(f"not done after {self._deadline_s} virtual seconds: {self._waiting()}")

    def _waiting(self) -> list[str]:
        return [str(task.get_coro()) for task in asyncio.all_tasks(self)]

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> asyncio.Future:
        future, early = self.create_future(), self.random.random() < 0.5
        result = _outcome(function, arguments) if early else None

        def done() -> None:
            value, error = result or _outcome(function, arguments)
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        self.call_later(self.random.random() * 0.02, done)
        return future

    def _process_events(self, events: Any) -> None:
        """There are none."""


def _outcome(function: Any, arguments: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def run(loop: VirtualLoop, work: Any) -> Any:
    """Return what `work` gives. Raises StuckError where it waits for ever, or leaves a task behind that does."""
    asyncio.set_event_loop(None)
    try:
        return loop.run_until_complete(work)
    finally:
        left = sorted(asyncio.all_tasks(loop), key=lambda task: int(task.get_name()))
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1000.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        gc.collect()  # an error that nobody asked for is told when its future is freed


@contextmanager
def collecting_after_runs() -> Iterator[None]:
    """Have `run` alone collect garbage, of what was made from now on: imports made a million objects before."""
    tasks = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    gc.freeze()
    gc.disable()
    tasks.add = lambda task: tasks.data.add(ref(task, tasks.data.discard))  # as its own, in one call
    try:
        yield
    finally:
        del tasks.add
        gc.enable()
        gc.unfreeze()
