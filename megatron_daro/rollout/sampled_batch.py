"""What the sampler (or replay) hands to the controller: one batch of groups, and where to continue after it.

Sampler or replay -> SampledBatch -> controller. The snapshot is taken when the batch is complete and before the next
one is begun, so a checkpoint written after the batch was trained repeats nothing and loses nothing, however far
generation has run ahead by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_daro.errors import CheckpointError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.groups_under_way import UnfinishedGroup
from megatron_daro.rollout.ledger import Ledger, Outcome
from megatron_daro.rollout.recorder import RecordedMiniBatch
from megatron_daro.types import Group


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where sampling stood: the prompt cursor, the books, and the groups that wait for the next batch.

    surplus: complete groups. unfinished: the others, by group id. counters: metric key -> value (docs/metrics.md).
    """

    source: Mapping[str, Any]
    ledger: Mapping[str, Any]
    surplus: tuple[Group, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    unfinished: tuple[UnfinishedGroup, ...] = ()

    @property
    def handed_over(self) -> frozenset[int]:
        """Ids of the groups that the controller had: of this batch, and of earlier ones that were not used up yet."""
        waiting = {group.group_id for group in self.surplus} | {group.group_id for group in self.unfinished}
        return frozenset(group_id for group_id, _ in self.ledger["outstanding"] if group_id not in waiting)

    def to_json(self, outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
        """Return the state to continue from, as plain values, without the groups that wait: those are `waiting`.

        Args:
            outcomes: of all groups of `handed_over`, and maybe of others.

        Returns:
            `source`, `ledger` and `counters`; only the groups of `surplus` and `unfinished` are outstanding.
        """
        ledger = Ledger()
        ledger.load_state_dict(self.ledger)
        for group_id in self.handed_over:
            ledger.finish([group_id], outcomes[group_id])
        waiting = tuple(sorted([g.group_id for g in self.surplus] + [g.group_id for g in self.unfinished]))
        assert ledger.outstanding == waiting, f"groups {ledger.outstanding} are outstanding but {waiting} wait"
        return {"source": dict(self.source), "ledger": ledger.state_dict(), "counters": dict(self.counters)}

    def waiting(self) -> tuple[RecordedGroup, ...]:
        """Return the groups of `surplus`, then those of `unfinished`, as they are written beside the state."""
        return (*(RecordedGroup(group) for group in self.surplus), *(group.to_record() for group in self.unfinished))


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """The groups of one batch and what sampling them took.

    groups: to be trained, by group id. filtered, dropped: the other groups that ended meanwhile (a dropped one may be
    incomplete). rounds: rounds of prompts. rollout_s: seconds. generated_tokens: generated in these seconds. counters:
    metric key -> value (docs/metrics.md). recorded: in a replay, the optimizer steps that were made of these groups.
    """

    groups: tuple[Group, ...]
    snapshot: Snapshot
    filtered: tuple[Group, ...] = ()
    dropped: tuple[Group, ...] = ()
    rounds: int = 0
    rollout_s: float = 0.0
    generated_tokens: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    recorded: tuple[RecordedMiniBatch, ...] = ()


@contextmanager
def reading_state() -> Iterator[None]:
    """Turn what reading a saved state raises into a CheckpointError: it is torn, or does not add up."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"the state of the sampler is not what a checkpoint holds ({type(error).__name__}: {error}); use an "
            "earlier checkpoint"
        ) from error


class BatchSource(Protocol):
    """Where the controller gets batches from: the sampler, or replay."""

    ledger: Ledger

    async def sample(self, use_version: int) -> SampledBatch | None:
        """Return the next batch, never empty; None when there is no more (replay).

        Args:
            use_version: the policy's weight version when the batch will be trained.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any], waiting: Sequence[RecordedGroup] = ()) -> None:
        """Continue where `Snapshot.to_json` says, with the groups of `Snapshot.waiting`. Raises CheckpointError."""
        ...
