"""An event loop with virtual time: it never waits, and the same seed gives the same schedule.

Where nothing is ready the clock jumps to the next timer. Callbacks that are ready at once run in the order in which
they became so, as asyncio promises, or, where `shuffled`, in an order drawn from the seed: what is right under both
does not rest on the order in which tasks wake up. Threads (`asyncio.to_thread`) are functions that are done at once,
before or after a drawn delay, also where whoever waits for them was cancelled meanwhile. FoundationDB's simulation
works like this.
"""

from __future__ import annotations

import asyncio
import heapq
from random import Random
from typing import Any


class StuckError(AssertionError):
    """Nothing will ever happen again, or not before the deadline."""


class VirtualLoop(asyncio.BaseEventLoop):
    """One schedule. random: of everything that a schedule draws."""

    def __init__(self, random: Random, *, deadline_s: float, shuffled: bool = False) -> None:
        super().__init__()
        self.random, self._deadline_s, self._shuffled = random, deadline_s, shuffled
        self._now, self._clock_resolution = 0.0, 1e-9
        self.faults: list[str] = []
        self.set_exception_handler(lambda _, context: self.faults.append(repr(context)))

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """As asyncio's own, without its checks: a schedule is mostly this."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """One callback; asyncio's own would ask a selector (base_events.py, 3.11)."""
        ready, timers = self._ready, self._scheduled
        if not ready:
            while timers and timers[0]._cancelled:
                self._timer_cancelled_count -= 1
                heapq.heappop(timers)._scheduled = False
            if not timers:
                raise StuckError(f"at {self._now:.3f} s everybody waits for somebody else: {self._waiting()}")
            self._now = max(self._now, timers[0]._when)
            if self._now > self._deadline_s:
                raise StuckError(f"not done after {self._deadline_s} virtual seconds: {self._waiting()}")
        while timers and timers[0]._when <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                ready.append(timer)
        if not ready:
            return
        if self._shuffled and len(ready) > 1:
            ready.rotate(-self.random.randrange(len(ready)))
        handle = ready.popleft()
        if not handle._cancelled:
            handle._run()

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

    def _write_to_self(self) -> None:
        """No thread but this one."""

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
        left = sorted(asyncio.all_tasks(loop), key=lambda task: int(task.get_name().removeprefix("Task-")))
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1000.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
