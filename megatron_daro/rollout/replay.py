"""Recorded batches instead of engines: the train part of a run, again.

RUN/rollouts -> ReplaySource -> controller, in the sampler's place. Gives the groups of every
recorded step that trained, in their recorded order and at their recorded step, so the batches are bit for bit those of
the recorded run. Filtered and dropped groups come with them, since accuracy counts them; they train nothing. It refuses
gaps (a run that was recorded in part), the older file format, and to go on where a run that generates stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import Ledger, Outcome
from megatron_daro.rollout.recorder import read_step, recorded_steps
from megatron_daro.rollout.sampled_batch import REPLAYED_STEP, SampledBatch, Snapshot, is_replay
from megatron_daro.types import Group


class ReplaySource:
    """The batch source of `train --replay RUN`."""

    def __init__(self, run_dir: Path, *, rollouts_per_prompt: int, deadlines: Deadlines | None = None) -> None:
        """Read the list of steps, no rollouts yet.

        Args:
            run_dir: the recorded run.
            rollouts_per_prompt: K of this run; must be that of the recorded one.
            deadlines: the table of deadlines.

        Raises:
            DataError: nothing was recorded, steps are missing between recorded ones, or files have the older format.
        """
        self._run_dir = Path(run_dir)
        self._size = rollouts_per_prompt
        self._deadlines = deadlines or Deadlines()
        self._steps = recorded_steps(self._run_dir)
        if not self._steps:
            raise DataError(f"{self._run_dir}/rollouts: no recorded steps; the run needs observe.save_rollouts=true")
        gaps = sorted(set(range(self._steps[0], self._steps[-1] + 1)) - set(self._steps))
        if gaps:
            raise DataError(f"{self._run_dir}/rollouts: step {gaps[0]} is missing; replay needs every step: restore it")
        self._last_step = self._steps[0] - 1
        self.ledger = Ledger()

    @property
    def steps(self) -> list[int]:
        """The recorded steps, in order."""
        return list(self._steps)

    def load_state_dict(self, state: Mapping[str, Any], waiting: Sequence[RecordedGroup] = ()) -> None:
        """Continues after the recorded step in `state`.

        Raises:
            CheckpointError: the state is of a run that generates, or torn.
        """
        if not is_replay(state):
            raise CheckpointError(
                "the checkpoint is of a run that generates its rollouts; resume it without --replay, or replay into a "
                "new trainer.run_dir"
            )
        try:
            self._last_step = int(state["source"][REPLAYED_STEP])
            self.ledger.load_state_dict(state["ledger"])
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(
                f"the state of a replay is not what a checkpoint holds ({type(error).__name__}: {error}); use an "
                "earlier checkpoint"
            ) from error

    def stale(self, groups: Sequence[Group], version: int) -> tuple[Group, ...]:
        """None: the recorded run has already dropped what was too old for it."""
        return ()

    async def sample(self, use_version: int) -> SampledBatch | None:
        """Return the groups of the next recorded step that trained any; None after the last one.

        Raises:
            DataError: a file is damaged, or its groups are not of K rollouts.
        """
        while self._last_step < self._steps[-1]:
            self._last_step += 1
            step = self._last_step
            recorded = await self._deadlines.within(
                "write", asyncio.to_thread(read_step, self._run_dir, step), what=f"reading step {step}"
            )
            if any(used == "trained" for _, used in recorded):
                return self._batch(step, recorded)
        return None

    def _batch(self, step: int, recorded: Sequence[tuple[Group, Outcome]]) -> SampledBatch:
        groups = tuple(group for group, used in recorded if used == "trained")
        filtered = tuple(group for group, used in recorded if used == "filtered")
        dropped = tuple(group for group, used in recorded if used == "dropped")
        wrong = next((g for g in groups if len(g.rollouts) != self._size), None)
        if wrong is not None:
            raise DataError(
                f"{self._run_dir}/rollouts: step {step} group {wrong.group_id} has {len(wrong.rollouts)} rollouts but "
                f"rollout.rollouts_per_prompt is {self._size}; set it to the recorded run's value"
            )
        self.ledger.admit_recorded([group.group_id for group, _ in recorded])
        self.ledger.finish([group.group_id for group in filtered], "filtered")
        self.ledger.finish([group.group_id for group in dropped], "dropped")
        return SampledBatch(
            groups=groups,
            filtered=filtered,
            dropped=dropped,
            snapshot=Snapshot({REPLAYED_STEP: step}, self.ledger.state_dict()),
            first_step=step,
        )
