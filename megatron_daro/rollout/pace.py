"""How far generation may run ahead of training.

The controller's `_generate` waits here for the turn of each batch; `_train` tells what became of those before. It
counts batches and optimizer steps, and knows nothing of what is in them.
"""

from __future__ import annotations

import asyncio


class Pace:
    """Batch m (from 0) may be generated once batch m - 1 - batches_ahead is trained and the engine has its weights: 0
    alternates the two, 1 overlaps them. No batch is begun that would be trained after the run's last step.
    """

    def __init__(self, steps: int, batches_ahead: int) -> None:
        """Begin before the first batch. Args: steps: optimizer steps of the run."""
        self._steps, self._batches_ahead = steps, batches_ahead
        self._changed = asyncio.Condition()
        self._step = 0
        self.batches_done = 0
        """Batches that were used up."""
        self.planned_step = 0
        """The optimizer step at which every batch that was sampled will be used up."""

    def go_on_from(self, step: int, batches_done: int) -> None:
        """Continue where a checkpoint says."""
        self._step = self.planned_step = step
        self.batches_done = batches_done

    def sampled(self, last_step: int) -> None:
        """Take note of a sampled batch, which will be used up at `last_step` if nothing of it is dropped."""
        self.planned_step = last_step

    def shortened(self, by: int) -> None:
        """Take note that a sampled batch has so many steps fewer than was planned. Call before `batch_done`: else
        generation, which planned with the whole batch, could wait for a step too many."""
        self.planned_step -= by

    async def may_generate(self, batch: int) -> bool:
        """Wait until the batch of this number may be generated. False: training needs no more batches."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._step >= self._steps
                    or (self.planned_step < self._steps and batch - self.batches_done <= self._batches_ahead)
                )
            )
        return self._step < self._steps

    async def batch_done(self, step: int) -> None:
        """One more batch is used up: the run is at this step, and the engine has its weights."""
        async with self._changed:
            self._step = step
            self.batches_done += 1
            self._changed.notify_all()
