"""How far generation may run ahead of training.

Before each batch the controller's `_generate` waits here; `_end_batch` reports each batch that is trained. Only batches
and optimizer steps are counted.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """Batch m (from 0) may be generated once batch m - 1 - batches_ahead is trained and the engine has its weights: 0
    alternates the two, 1 overlaps them. No batch is begun that would be trained after the run's last step.
    """

    def __init__(self, steps: int, batches_ahead: int) -> None:
        """Begin before the first batch. Args: steps: optimizer steps of the run."""
        self._steps, self._batches_ahead = steps, batches_ahead
        self._changed = asyncio.Condition()
        self._step = 0
        self._steps_of: deque[int] = deque()  # of the batches that are sampled and not trained yet, oldest first
        self.batches_done = 0
        """Batches that are trained."""

    @property
    def planned_step(self) -> int:
        """The optimizer step once every batch sampled so far is trained."""
        return self._step + sum(self._steps_of)

    def go_on_from(self, step: int, batches_done: int) -> None:
        """Continue where a checkpoint says."""
        self._step = step
        self.batches_done = batches_done

    def sampled(self, steps: int) -> None:
        """Count a sampled batch. Args: steps: optimizer steps that it will take."""
        self._steps_of.append(steps)

    async def may_generate(self, batch: int) -> bool:
        """Wait until the batch with this number may be generated, or no more are needed: then return False."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._step >= self._steps
                    or (self.planned_step < self._steps and batch - self.batches_done <= self._batches_ahead)
                )
            )
        return self._step < self._steps

    async def batch_done(self, step: int) -> None:
        """Count a trained batch: the run is at this step, and the engine has its weights."""
        async with self._changed:
            self._step = step
            self._steps_of.popleft()
            self.batches_done += 1
            self._changed.notify_all()
