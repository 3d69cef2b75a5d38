"""Calls from one event loop to that of another thread, a few at a turn of it.

Conversations pass between the run's loop and the environments' this way. Waking the other loop for each call, which
hands it Python's lock in the middle of a turn, and all calls in one turn of it, would hold both loops for seconds where
thousands of conversations go on at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_DELAY_S = 0.002
"""What is posted within this time goes together."""
_AT_ONCE = 32
"""Calls in one turn of the loop: each may resume a coroutine, and all of these run before anything else."""


class LoopCalls:
    """Runs functions on one event loop, in the order in which they were posted on another."""

    def __init__(self, source: asyncio.AbstractEventLoop, target: asyncio.AbstractEventLoop) -> None:
        """Call nothing yet. source: where `post` is called. target: where the functions are."""
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
