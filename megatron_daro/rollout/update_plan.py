"""Which groups of a batch train at which optimizer step.

Place in the data flow: a sampled batch -> the controller's optimizer steps. Groups keep their order; with several
updates per batch each gets consecutive groups, as evenly as possible. It measures and trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_daro.rollout.ledger import Outcome
from megatron_daro.rollout.sampled_batch import SampledBatch
from megatron_daro.types import Group


@dataclass(slots=True)
class Update:
    """One optimizer step in the making.

    version: the policy's weight version when the batch began to train. filtered, dropped: what is recorded with this
    step although it does not train (the first update of a batch has them all). last: the batch's last update.
    """

    step: int
    version: int
    groups: tuple[Group, ...]
    last: bool
    filtered: tuple[Group, ...] = ()
    dropped: tuple[Group, ...] = ()
    outcome: Outcome = "trained"
    metrics: dict[str, float] = field(default_factory=dict)


def last_step(batch: SampledBatch, step: int, updates_per_batch: int) -> int:
    """Return the optimizer step at which a batch will be used up, if it begins after `step` and nothing of it is
    dropped."""
    return batch.first_step or step + min(updates_per_batch, len(batch.groups))


def plan_updates(
    batch: SampledBatch, stale: Sequence[Group], step: int, updates_per_batch: int, steps: int
) -> tuple[list[Update], tuple[Group, ...]]:
    """Split what is fresh into one part per optimizer step.

    Args:
        batch: the sampled batch. stale: its groups that are too old.
        step: optimizer steps done. updates_per_batch: parts. steps: optimizer steps of the whole run.

    Returns:
        (updates, unused groups: the stale ones, and those for which the run has no more steps). No updates if
        everything is stale.
    """
    fresh = [group for group in batch.groups if group not in stale]
    replayed = batch.first_step is not None
    parts = _split(fresh, 1 if replayed else updates_per_batch)
    room = 1 if replayed else steps - step
    unused = (*stale, *(group for part in parts[room:] for group in part))
    parts = parts[:room]
    first = batch.first_step or step + 1
    updates = [Update(first + i, step, part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    if updates:
        updates[0].filtered = batch.filtered
    return updates, unused


def _split(groups: Sequence[Group], parts: int) -> list[tuple[Group, ...]]:
    """Consecutive parts whose sizes differ by at most one; no more parts than groups."""
    parts = min(parts, len(groups))
    bounds = [i * len(groups) // parts for i in range(parts + 1)] if parts else []
    return [tuple(groups[a:b]) for a, b in pairwise(bounds)]


def passed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; `every` 0 is never."""
    return every > 0 and after // every > before // every
