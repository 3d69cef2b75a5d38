"""Lines of metrics in the order of their steps. The line of a step that is evaluated waits for the evaluation, and the
lines of later steps wait as well.

The controller adds the line of every step; an evaluation that runs beside training holds the line of its step and
releases it (rollout/evaluation.py). Lines that wait are not on disk yet; `close` writes them, however the run ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from megatron_daro.deadlines import to_the_end

Write = Callable[[int, Mapping[str, float]], Awaitable[None]]
"""(step, metrics) -> the line is on disk when it is done; `MetricsLog.write` in a thread, with its own deadline, is
one."""


class StepLines:
    """The lines of one run."""

    def __init__(self, write: Write) -> None:
        """Write nothing yet. Args: write: called with each line once it is complete."""
        self._write = write
        self._held: int | None = None
        self._waiting = deque[tuple[int, Mapping[str, float]]]()
        self._more: dict[int, Mapping[str, float]] = {}
        self._one_at_a_time = asyncio.Lock()

    def hold(self, step: int) -> None:
        """Hold back the line of this step, and all later ones, until it is released. Only one step may be held."""
        assert self._held is None, f"the line of step {self._held} is still held"
        self._held = step

    async def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step, now or once the held step is released. Raises DataError: the disk refused."""
        self._waiting.append((step, metrics))
        await self._write_all()

    async def release(self, step: int, more: Mapping[str, float]) -> None:
        """Add metrics to the line of a held step, whether it was added already or comes later, and write the lines that
        waited. Do nothing if the step is not held any more. Raises DataError: the disk refused."""
        if self._held == step:
            self._held, self._more[step] = None, more
            await self._write_all()

    async def close(self) -> None:
        """Write the lines that wait as they are. May be called twice. Raises DataError: the disk refused."""
        self._held = None
        await self._write_all()

    async def _write_all(self) -> None:
        async with self._one_at_a_time:
            while self._waiting and self._held is None:
                step, metrics = self._waiting.popleft()
                await to_the_end(self._write(step, {**metrics, **self._more.pop(step, {})}))
