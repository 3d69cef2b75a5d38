"""Optimizer steps that were skipped because they were not finite: how many, and when they end a run.

The controller reports the optimizer steps that it tries. Batches without a trainable group never get that far: the
sampler fills them up or ends the run.
"""

from __future__ import annotations

from megatron_daro.errors import DataError
from megatron_daro.rollout.minibatches import MiniBatch

_MAX_BATCHES_IN_A_ROW = 5


class SkippedSteps:
    """Counts skipped steps. `total`, since the run began, is in the line of each optimizer step
    (`rollout/steps_skipped`) and in checkpoints.

    The fifth batch in a row all of whose steps were skipped ends the run; a resumed run counts batches anew.
    """

    def __init__(self) -> None:
        self.total = 0
        self._batches_in_a_row = 0
        self._trained_step = 0

    def trained(self, minibatch: MiniBatch) -> None:
        """Take note of a step that was taken."""
        self._trained_step, self._batches_in_a_row = minibatch.step, 0

    def skipped(self, minibatch: MiniBatch, cause: str) -> None:
        """Take note of a step that was skipped. Raises DataError: too many batches in a row trained nothing."""
        self.total += 1
        if minibatch.last and self._trained_step < minibatch.first_step:  # nor was any other step of the batch taken
            self._batches_in_a_row += 1
            if self._batches_in_a_row >= _MAX_BATCHES_IN_A_ROW:
                raise DataError(f"{self._batches_in_a_row} batches in a row trained nothing; the last: {cause}")
