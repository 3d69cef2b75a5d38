"""What trained nothing: steps that were skipped, batches that are lost, and how many of these end a run.

The controller reports every optimizer step and every batch that has none. Batches without a trainable group never get
that far: the sampler fills them up or ends the run. Holds counts and groups; writes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_daro.errors import DataError
from megatron_daro.rollout.minibatches import MiniBatch
from megatron_daro.rollout.sampled_batch import SampledBatch

_MAX_IN_A_ROW = 5


class LostBatches:
    """A batch is lost if no optimizer step of it was taken: all were skipped, or it has none since all of its groups
    were too old.

    * Skipped steps are counted since the run began: in every line of metrics (`rollout/steps_skipped`) and in
      checkpoints.
    * Lost batches are counted since the last step that was taken; the fifth in a row ends the run. No
      checkpoint has this count: a resumed run counts anew.
    * Groups of a lost batch whose steps were skipped are recorded with these steps. Those of one without a step are
      recorded and measured with the next batch, as dropped; if the run ends before, they are in no file.
    """

    def __init__(self) -> None:
        self.skipped_steps = 0
        self._in_a_row = 0
        self._trained_step = 0
        self._without_step: SampledBatch | None = None

    def join_to(self, batch: SampledBatch) -> SampledBatch:
        """Return the batch that comes next with what those without a step before it took: their groups are dropped."""
        lost, self._without_step = self._without_step, None
        if lost is None:
            return batch
        return replace(
            batch,
            filtered=(*lost.filtered, *batch.filtered),
            dropped=(*lost.dropped, *lost.groups, *batch.dropped),
            rounds=lost.rounds + batch.rounds,
            rollout_s=lost.rollout_s + batch.rollout_s,
            response_tokens=lost.response_tokens + batch.response_tokens,
        )

    @property
    def unrecorded_groups(self) -> int:
        """Groups that wait for a step to be recorded with."""
        lost = self._without_step
        return len(lost.groups) + len(lost.filtered) + len(lost.dropped) if lost else 0

    def without_step(self, batch: SampledBatch, cause: str) -> None:
        """Take in a batch that has no step, with those that were joined to it. Raises DataError: too many are lost."""
        self._without_step = batch
        self._count(cause)

    def step_trained(self, minibatch: MiniBatch) -> None:
        """Take note of a step that was taken."""
        self._trained_step, self._in_a_row = minibatch.step, 0

    def step_skipped(self, minibatch: MiniBatch, cause: str) -> None:
        """Take note of a step that was skipped. Raises DataError: too many batches are lost, with this one."""
        self.skipped_steps += 1
        if minibatch.last and self._trained_step < minibatch.first_step:  # nor did the batch's steps before it
            self._count(cause)

    def _count(self, cause: str) -> None:
        self._in_a_row += 1
        if self._in_a_row >= _MAX_IN_A_ROW:
            raise DataError(f"{self._in_a_row} batches in a row trained nothing; the last: {cause}")
