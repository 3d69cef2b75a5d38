"""What the sampler (or replay) hands to the controller: one batch of groups, and where to continue after it.

Sampler or replay -> SampledBatch -> controller. The snapshot is taken when the batch is
complete and before the next one is begun, so a checkpoint written after the batch was trained repeats nothing and
loses nothing, however far generation has run ahead by then. Holds no behaviour beyond that.

Which groups of a batch train at which optimizer step.

A sampled batch -> the controller's optimizer steps. Groups keep their order; with several
updates per batch each gets consecutive groups, as evenly as possible. It measures and trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import Ledger, Outcome
from megatron_daro.rollout.rollouter import PartialGroup
from megatron_daro.types import Group

REPLAYED_STEP = "last_step"
"""The key of a replay's source state: the recorded step that it is at."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where sampling stood: the prompt cursor, the books, and the groups that wait for the next batch.

    carry: complete groups. partial: unfinished ones, by group id. counters: metric key -> count since the run began.
    """

    source: Mapping[str, Any]
    ledger: Mapping[str, Any]
    carry: tuple[Group, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    partial: tuple[PartialGroup, ...] = ()

    def to_json(self, resolved: Mapping[int, Outcome]) -> dict[str, Any]:
        """Return the state to continue from, as plain values, without the groups that wait: those are `waiting`.

        Args:
            resolved: what became of the groups that were handed over up to this batch. All of them must be in it.

        Returns:
            `source`, `ledger` and `counters`; only the groups of `carry` and `partial` are outstanding.
        """
        ledger = Ledger()
        ledger.load_state_dict(self.ledger)
        for group_id in ledger.outstanding:
            if group_id in resolved:
                ledger.finish([group_id], resolved[group_id])
        waiting = tuple(sorted([g.group_id for g in self.carry] + [g.group_id for g in self.partial]))
        assert ledger.outstanding == waiting, f"groups {ledger.outstanding} are outstanding but {waiting} are carried"
        return {"source": dict(self.source), "ledger": ledger.state_dict(), "counters": dict(self.counters)}

    def waiting(self) -> tuple[RecordedGroup, ...]:
        """Return the groups of `carry`, then those of `partial`, as they are written beside the state."""
        return (*(RecordedGroup(group) for group in self.carry), *(group.to_record() for group in self.partial))


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """The groups of one training batch and what sampling them took.

    groups: to be trained, by group id. filtered, dropped: the others that ended meanwhile (a dropped group may be
    incomplete). rounds: rounds of prompts. rollout_s: seconds. response_tokens: generated in these seconds.
    counters: metric key -> count since the run began. first_step: the optimizer step the batch must be trained at
    (replay); None: the next one.
    """

    groups: tuple[Group, ...]
    snapshot: Snapshot
    filtered: tuple[Group, ...] = ()
    dropped: tuple[Group, ...] = ()
    rounds: int = 0
    rollout_s: float = 0.0
    response_tokens: int = 0
    first_step: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


def is_replay(state: Mapping[str, Any]) -> bool:
    """Whether a source's saved state is that of a replay."""
    source = state.get("source")
    return isinstance(source, Mapping) and REPLAYED_STEP in source


class BatchSource(Protocol):
    """Where the controller gets batches from: the sampler, or replay."""

    ledger: Ledger

    async def sample(self, use_version: int) -> SampledBatch | None:
        """Return the next batch, never empty; None when there is no more (replay).

        Args:
            use_version: the policy's weight version when the batch will be trained.
        """
        ...

    def stale(self, groups: Sequence[Group], version: int) -> tuple[Group, ...]:
        """Those that are too old to be trained by a policy of this weight version."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], waiting: Sequence[RecordedGroup] = ()) -> None:
        """Continue where `Snapshot.to_json` says, with the groups of `Snapshot.waiting`. Raises CheckpointError."""
        ...


@dataclass(slots=True)
class Update:
    """One optimizer step in the making.

    version: the policy's weight version when the batch began to train. filtered, dropped: what is recorded with this
    step although it does not train (the first update of a batch has them all). first, last: whether it is the first and
    the last update of its batch.
    """

    step: int
    version: int
    groups: tuple[Group, ...]
    last: bool
    first: bool = True
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
    updates = [Update(first + i, step, part, last=i == len(parts) - 1, first=i == 0) for i, part in enumerate(parts)]
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
