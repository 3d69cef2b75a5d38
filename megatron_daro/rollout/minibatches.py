"""Which groups of a batch train at which optimizer step.

A sampled batch -> the controller's optimizer steps. Groups keep their order; with several mini-batches each gets
consecutive groups, as evenly as possible. Further epochs take all of the batch's groups again, in an order determined
by seed, batch and epoch. A replayed batch has the steps that were recorded. It measures and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_daro.config.sections import TrainerSection
from megatron_daro.rollout.recorder import RecordedMiniBatch
from megatron_daro.rollout.sampled_batch import SampledBatch
from megatron_daro.types import Group


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What is planned for one optimizer step.

    filtered, dropped: groups that are recorded with this step although they do not train. They and generated_tokens are
    those of the whole batch in its first mini-batch that trains, and empty or 0 in the others. first, last: whether it
    is the first or the last of its batch that trains. first_step: the batch's first optimizer step. epoch: of the
    batch, from 1. again: ids of groups that a later mini-batch of the batch takes. trains: false in a replay for a step
    that was skipped as not finite.
    """

    step: int
    groups: tuple[Group, ...]
    first_step: int
    last: bool = False
    first: bool = False
    epoch: int = 1
    again: frozenset[int] = frozenset()
    trains: bool = True
    filtered: tuple[Group, ...] = ()
    dropped: tuple[Group, ...] = ()
    generated_tokens: int = 0

    @property
    def batch_version(self) -> int:
        """The policy's weight version before the batch's first step."""
        return self.first_step - 1

    def record(self, *, applied: bool) -> RecordedMiniBatch:
        """Return what a replay needs of it. Args: applied: whether the step was taken, and not skipped."""
        ids = tuple(group.group_id for group in self.groups)
        return RecordedMiniBatch(self.step, self.first_step, self.epoch, ids, applied)


def planned_steps(batch: SampledBatch, step: int, section: TrainerSection) -> int:
    """Return how many optimizer steps a batch takes, if it begins after `step` and the run has that many left."""
    if batch.recorded:
        return batch.recorded[-1].step - step
    return min(section.minibatches_per_batch, len(batch.groups)) * section.epochs_per_batch


def plan_minibatches(
    batch: SampledBatch, step: int, section: TrainerSection
) -> tuple[list[MiniBatch], tuple[Group, ...]]:
    """Split a batch into one part per optimizer step.

    Args:
        batch: the sampled batch.
        step: optimizer steps done. section: parts, epochs, seed, and the optimizer steps of the whole run.

    Returns:
        (mini-batches, groups for which the run has no more steps). At least one mini-batch trains, in a recorded batch
        too (rollout/replay.py).
    """
    ids = [group.group_id for group in batch.groups]
    steps = [one for one in batch.recorded or _steps(ids, step, section) if one.step <= section.steps]
    last_use = {group_id: one.step for one in steps for group_id in one.group_ids}
    unused = tuple(group for group in batch.groups if group.group_id not in last_use)
    group_of_id = {group.group_id: group for group in batch.groups}
    trained = [one.step for one in steps if one.applied]
    minibatches: list[MiniBatch] = []
    for one in steps:
        first = one.step == trained[0]
        minibatches.append(
            MiniBatch(
                one.step,
                tuple(group_of_id[group_id] for group_id in one.group_ids),
                one.first_step,
                first=first,
                last=one.step == trained[-1],
                epoch=one.epoch,
                again=frozenset(group_id for group_id, last in last_use.items() if last > one.step),
                trains=one.applied,
                filtered=batch.filtered if first else (),
                dropped=(*batch.dropped, *unused) if first else (),
                generated_tokens=batch.generated_tokens if first else 0,
            )
        )
    return minibatches, unused


def _steps(groups: Sequence[int], step: int, section: TrainerSection) -> list[RecordedMiniBatch]:
    """Split the ids of groups into steps: in the given order in the first epoch, and in a new order in each further
    one. Returns what a run will record of these steps if all of them train."""
    steps: list[RecordedMiniBatch] = []
    for epoch in range(1, section.epochs_per_batch + 1):
        ordered = groups if epoch == 1 else [groups[i] for i in epoch_order(len(groups), section.seed, step + 1, epoch)]
        for part in _split(ordered, section.minibatches_per_batch):
            steps.append(RecordedMiniBatch(step + len(steps) + 1, step + 1, epoch, part, applied=True))
    return steps


def epoch_order(num_groups: int, seed: int, first_step: int, epoch: int) -> list[int]:
    """Return the order of a batch's groups in an epoch after the first.

    Args:
        num_groups: of the batch. seed: of the run. first_step: the batch's first optimizer step. epoch: from 2.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, first_step, epoch])).random_raw(num_groups)
    return np.argsort(keys, kind="stable").tolist()


def _split(groups: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Return consecutive parts whose sizes differ by at most one; no more parts than groups."""
    parts = min(parts, len(groups))
    bounds = [i * len(groups) // parts for i in range(parts + 1)] if parts else []
    return [tuple(groups[a:b]) for a, b in pairwise(bounds)]


def passed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; `every` 0 is never."""
    return every > 0 and after // every > before // every
