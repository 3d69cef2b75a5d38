"""Recorded batches instead of engines: repeats the training part of a run.

RUN/rollouts -> ReplaySource -> controller, in the sampler's place. It gives the groups of every recorded batch that
trained, with its mini-batches and epochs at their recorded steps, so training is bit for bit that of the recorded run.
Filtered and dropped groups come with them, since accuracy counts them; they train nothing. It refuses a recording with
gaps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_daro.config.sections import TrainerSection
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import Ledger, Outcome
from megatron_daro.rollout.recorder import RecordedMiniBatch, read_minibatch, read_step, recorded_steps
from megatron_daro.rollout.sampled_batch import SampledBatch, Snapshot, reading_state
from megatron_daro.types import Group

_STEP = "last_step"
"""Key of the source's state: the recorded step after which it continues."""


class ReplaySource:
    """The batch source of `train --replay RUN`."""

    def __init__(
        self, run_dir: Path, *, section: TrainerSection, rollouts_per_prompt: int, deadlines: Deadlines
    ) -> None:
        """Read the list of steps and what the first batch was made of, but no rollouts yet.

        Args:
            run_dir: the recorded run. section: of this run, whose batches must have at least as many steps and epochs.
            rollouts_per_prompt: K of this run; must be that of the recorded one.
            deadlines: the table of deadlines.

        Raises:
            DataError: nothing was recorded, steps are missing before the last one, or the first batch has more steps or
                epochs than this run's.
        """
        self._run_dir, self._section = Path(run_dir), section
        self._size = rollouts_per_prompt
        self._deadlines = deadlines
        self._steps = recorded_steps(self._run_dir)
        if not self._steps:
            raise DataError(f"{self._run_dir}/rollouts: no recorded steps; the run needs observe.save_rollouts=true")
        gaps = sorted(set(range(1, self._steps[-1] + 1)) - set(self._steps))
        if gaps:
            raise DataError(
                f"{self._run_dir}/rollouts: step {gaps[0]} is missing; replay begins with the weights of step 0 and "
                "needs every step from 1 on: restore it, or record the run from its start"
            )
        self._last_step = 0
        self.ledger = Ledger()
        self._check_size(self._minibatches(1))

    def load_state_dict(self, state: Mapping[str, Any], waiting: Sequence[RecordedGroup] = ()) -> None:
        """Continue after the recorded step in `state`.

        Raises:
            CheckpointError: the state is torn.
        """
        with reading_state():
            self._last_step = int(state["source"][_STEP])
            self.ledger.load_state_dict(state["ledger"])

    async def sample(self, use_version: int) -> SampledBatch | None:
        """Return the next recorded batch that trained any group; None after the last one.

        Raises:
            DataError: a file is damaged, groups do not have K rollouts, or the batch has more steps or epochs than this
                run's.
        """
        while self._last_step < self._steps[-1]:
            reading = asyncio.to_thread(self._read_batch, self._last_step + 1)
            minibatches, groups = await self._deadlines.within(
                "load", reading, what=f"reading step {self._last_step + 1}"
            )
            self._last_step = minibatches[-1].step
            if any(minibatch.applied and minibatch.step <= self._section.steps for minibatch in minibatches):
                return self._batch(minibatches, groups)
        return None

    def _read_batch(self, first: int) -> tuple[list[RecordedMiniBatch], list[tuple[Group, Outcome]]]:
        """Return the steps of the batch that begins with this one, and all of its groups with what became of them."""
        minibatches = self._minibatches(first)
        self._check_size(minibatches)
        groups = [pair for minibatch in minibatches for pair in read_step(self._run_dir, minibatch.step)]
        return minibatches, groups

    def _minibatches(self, first: int) -> list[RecordedMiniBatch]:
        """Return the steps of the batch that begins with this one."""
        minibatches: list[RecordedMiniBatch] = []
        for step in range(first, self._steps[-1] + 1):
            minibatch = read_minibatch(self._run_dir, step)
            if minibatches and minibatch.first_step != first:
                break
            minibatches.append(minibatch)
        if minibatches[0].first_step != first:
            raise DataError(
                f"{self._run_dir}/rollouts: step {first} is in the middle of the batch of step "
                f"{minibatches[0].first_step}, and a replay that ended there (trainer.steps, or a recording that was "
                "going on) cannot go on exactly; allowed: from a step that begins a batch; fix: replay into a new "
                "trainer.run_dir"
            )
        return minibatches

    def _check_size(self, minibatches: Sequence[RecordedMiniBatch]) -> None:
        """Refuse a batch with more steps or epochs than this run's options: its old log-probs would be made
        differently."""
        epochs, steps = minibatches[-1].epoch, minibatches[-1].step - minibatches[0].first_step + 1
        if epochs > self._section.epochs_per_batch or steps > self._section.steps_per_batch:
            raise DataError(
                f"{self._run_dir}/rollouts: the batch of step {minibatches[0].step} has {steps} steps in {epochs} "
                f"epochs, but trainer.minibatches_per_batch is {self._section.minibatches_per_batch} and "
                f"trainer.epochs_per_batch {self._section.epochs_per_batch}; set both to the recorded run's values"
            )

    def _batch(
        self, minibatches: Sequence[RecordedMiniBatch], recorded: Sequence[tuple[Group, Outcome]]
    ) -> SampledBatch:
        # Old log-probs are made of the mini-batches of the first epoch. So one whose step was skipped there is planned
        # as well, if a step that was taken trains one of its groups.
        within = [minibatch for minibatch in minibatches if minibatch.step <= self._section.steps]
        trained = {group_id for minibatch in within if minibatch.applied for group_id in minibatch.group_ids}
        planned = [one for one in within if one.applied or (one.epoch == 1 and not trained.isdisjoint(one.group_ids))]
        ids = dict.fromkeys(group_id for minibatch in planned for group_id in minibatch.group_ids)  # in batch order
        of_id = {group.group_id: group for group, _ in recorded}
        groups = tuple(of_id[group_id] for group_id in ids if group_id in of_id)
        filtered = tuple(group for group, used in recorded if used == "filtered")
        dropped = tuple(group for group, used in recorded if used != "filtered" and group.group_id not in ids)
        wrong = next((g for g in groups if len(g.rollouts) != self._size), None)
        if wrong is not None:
            raise DataError(
                f"{self._run_dir}/rollouts: step {planned[0].step} group {wrong.group_id} has {len(wrong.rollouts)} "
                f"rollouts but rollout.rollouts_per_prompt is {self._size}; set it to the recorded run's value"
            )
        missing = sorted(ids.keys() - of_id.keys())
        if missing:
            raise DataError(
                f"{self._run_dir}/rollouts: step {planned[0].step}: its batch has group {missing[0]}, which no file of "
                "the batch has; restore them"
            )
        self.ledger.admit_recorded([group.group_id for group, _ in recorded])
        self.ledger.finish([group.group_id for group in filtered], "filtered")
        self.ledger.finish([group.group_id for group in dropped], "dropped")
        return SampledBatch(
            groups=groups,
            filtered=filtered,
            dropped=dropped,
            snapshot=Snapshot({_STEP: within[-1].step}, self.ledger.state_dict()),
            recorded=tuple(planned),
        )
