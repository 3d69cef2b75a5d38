"""Lines of metrics in the order of their steps: that of an evaluated step waits for its evaluation, and so do those
after it.

The controller adds the line of every step, and an evaluation that goes on beside training holds it and releases it
(rollout/evaluation.py). What is held is on no disk yet; `close` writes it, however the run ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from megatron_daro.deadlines import to_the_end

Write = Callable[[int, Mapping[str, float]], Awaitable[None]]
"""(step, metrics): durable when it is done, such as `MetricsLog.write` in a thread, with a deadline of its own."""


class StepLines:
    """Those of one run."""

    def __init__(self, write: Write) -> None:
        """Write nothing. Args: write: takes each line, once all of it is there."""
        self._write = write
        self._held: int | None = None
        self._waiting = deque[tuple[int, Mapping[str, float]]]()
        self._more: dict[int, Mapping[str, float]] = {}
        self._one_at_a_time = asyncio.Lock()

    def hold(self, step: int) -> None:
        """Keep the line of this step, and all after it, until it is released. One step is held at a time."""
        assert self._held is None, f"the line of step {self._held} is still held"
        self._held = step

    async def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step, now or when what is held is released. Raises DataError: as the disk does."""
        self._waiting.append((step, metrics))
        await self._write_all()

    async def release(self, step: int, more: Mapping[str, float]) -> None:
        """Give the line of a held step these metrics too, whether it was added already or comes later, and write what
        waits for it; nothing where it is not held any more. Raises DataError: as the disk does."""
        if self._held == step:
            self._held, self._more[step] = None, more
            await self._write_all()

    async def close(self) -> None:
        """Write what is held as it is. May be called twice. Raises DataError: as the disk does."""
        self._held = None
        await self._write_all()

    async def _write_all(self) -> None:
        async with self._one_at_a_time:
            while self._waiting and self._held is None:
                step, metrics = self._waiting.popleft()
                await to_the_end(self._write(step, {**metrics, **self._more.pop(step, {})}))
