"""The thread in which a user's coroutines run, with an event loop of its own, and calls between it and the run's loop.

A coroutine that blocks then holds up neither the engine nor the loop of the run. Calls are passed on together, and run
a few per turn of the loop. With thousands of conversations at once, both loops would be held up for seconds if each
call woke the other loop, which hands it Python's lock in the middle of a turn, or if all calls ran in one turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_DELAY_S = 0.002
"""Calls posted within this time are passed on together."""
_AT_ONCE = 32
"""Calls in one turn of the loop: each may resume a coroutine, and all of these run before anything else."""


class LoopCalls:
    """Runs functions on one event loop, in the order in which they were posted on another."""

    def __init__(self, source: asyncio.AbstractEventLoop, target: asyncio.AbstractEventLoop) -> None:
        """Call nothing yet. source: where `post` is called. target: where the functions run."""
        self._source, self._target = source, target
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._scheduled = False

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it on the target loop, soon."""
        self._calls.append((function, arguments))
        if not self._scheduled:
            self._scheduled = True
            self._source.call_later(_DELAY_S, self._wake)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the target is closed: nobody there asks any more
            self._target.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False  # before the calls are looked at: one that is posted from now on schedules another turn
        try:
            for _ in range(min(_AT_ONCE, len(self._calls))):
                function, arguments = self._calls.popleft()
                function(*arguments)
        finally:
            if self._calls and not self._scheduled:
                self._scheduled = True
                self._target.call_soon(self._run)


class EnvironmentThread:
    """An event loop in a thread of its own. Made on the run's loop.

    loop: its own; run_loop: the run's. to_environment, to_run: calls from one to the other.
    """

    def __init__(self) -> None:
        self.run_loop, self.loop = asyncio.get_running_loop(), asyncio.new_event_loop()
        self.to_environment = LoopCalls(self.run_loop, self.loop)
        self.to_run = LoopCalls(self.loop, self.run_loop)
        threading.Thread(target=self.loop.run_forever, name="environments", daemon=True).start()

    def close(self) -> None:
        """Cancel what is left and end the loop, as soon as what it is doing allows it."""
        self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)  # after the cancelled tasks had their turn
