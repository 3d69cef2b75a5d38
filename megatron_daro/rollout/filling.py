"""The ways to fill a batch, one for each value of `rollout.finish_batch`. A way decides how many groups to begin,
whether each group is an engine call of its own, and when the batch is complete; `BatchFiller` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from megatron_daro.config.sections import FinishBatch, RolloutSection
from megatron_daro.rollout.batch_so_far import BatchSoFar
from megatron_daro.rollout.groups_under_way import Flight

_PRIOR_GROUPS = 8
"""`WaitForEnough` estimates the share of groups that the filter keeps. Its estimate begins at that of the last flight,
weighted as so many groups: otherwise one filtered group at the beginning would look like a filter that keeps nothing,
and four times the prompts would be admitted."""


class Filling(Protocol):
    """A way to fill a batch. `BatchFiller.fill` asks `wanted` when a flight begins. When an engine call has ended and
    its groups are in the batch, it asks `is_enough`, if the batch keeps a group, and, if not, `wanted` again. Nothing
    is asked between two such ends: a way that ends batches by the clock needs a change of `fill`, too, where
    `_next_ended` waits for the next end and ends the run at its deadline.

    group_by_group: whether each group is an engine call of its own, so that a batch can end as soon as enough groups
    have; otherwise groups that begin together are one call.
    """

    group_by_group: bool

    def is_enough(self, batch: BatchSoFar, flight: Flight) -> bool:
        """Whether the batch is complete although groups are still in flight; it keeps at least one."""
        ...

    def wanted(self, batch: BatchSoFar, flight: Flight, missing: int) -> int:
        """Return how many groups to begin now. `old_and_new` says which; with `segment_tokens` unfinished groups begin
        even if this is 0 or less.

        Args:
            missing: how many kept groups the batch still lacks to `prompts_per_batch`, the most that it trains. Groups
                in flight are not subtracted: a way does that itself. New groups that were set aside are.
        """
        ...

    def prompts_left(self, flight: Flight) -> float:
        """Return how many more new prompts this flight may begin."""
        ...

    def flight_ended(self, batch: BatchSoFar, flight: Flight) -> int:
        """Note how the flight went. Returns how many rounds of prompts it took, for metrics and messages."""
        ...


def old_and_new(section: RolloutSection, unfinished: int, wanted: int) -> tuple[int, int]:
    """Return (how many unfinished groups of earlier flights to continue, how many new prompts to begin).

    Args:
        unfinished: groups that earlier flights left. wanted: groups to begin; unfinished ones come first. With
            `segment_tokens` all unfinished groups continue, and `wanted` counts new prompts alone.
    """
    if section.segment_tokens is not None:
        return unfinished, wanted
    old = min(unfinished, wanted)
    return old, wanted - old


class WaitForAll:
    """Groups begin in rounds, and the next round begins when all groups of this one have ended. A round is one engine
    call (and retries for what it lacks), which suits an engine that decodes one batch at a time. The content of a batch
    depends only on the saved state and the answers. So with an engine that repeats (embedded) the run does, too, while
    generation runs at most one batch ahead: from two on it depends on timing which batch gets new weights first."""

    group_by_group = False

    def __init__(self, section: RolloutSection) -> None:
        """Args: section: the configuration's."""
        self._section = section

    def is_enough(self, batch: BatchSoFar, flight: Flight) -> bool:
        """False: a round is always waited for."""
        return False

    def wanted(self, batch: BatchSoFar, flight: Flight, missing: int) -> int:
        """Return the groups of the next round; 0 while one is in flight and after the last."""
        if flight.calls or flight.times_begun > self._section.max_refill_rounds:
            return 0
        return math.ceil(missing * self._section.oversampling / batch.keep_rate())

    def prompts_left(self, flight: Flight) -> float:
        """No limit: the number of rounds has one."""
        return math.inf

    def flight_ended(self, batch: BatchSoFar, flight: Flight) -> int:
        """Return the rounds that were begun."""
        return flight.times_begun


class WaitForEnough:
    """Each group is an engine call of its own, which suits servers. A group that the filter takes out is replaced while
    others are still generated. The batch ends with enough trainable groups: what is in flight is aborted, and continues
    in the next batch or is dropped. Runs do not repeat exactly. A "round" here is only a number of prompts,
    oversampling x prompts_per_batch."""

    group_by_group = True

    def __init__(self, section: RolloutSection) -> None:
        """Args: section: the configuration's."""
        self._section = section
        self._keep_rate = 1.0

    def is_enough(self, batch: BatchSoFar, flight: Flight) -> bool:
        """True with prompts_per_batch kept groups."""
        return len(batch.kept) >= self._section.prompts_per_batch

    def wanted(self, batch: BatchSoFar, flight: Flight, missing: int) -> int:
        """Return what is missing, with a reserve for the filter, less what is in flight."""
        return math.ceil(missing * self._section.oversampling / self._rate(batch)) - len(flight.calls)

    def prompts_left(self, flight: Flight) -> float:
        """Return what is left of the prompts of 1 + max_refill_rounds rounds."""
        return (1 + self._section.max_refill_rounds) * self._section.prompts_requested - flight.admitted

    def flight_ended(self, batch: BatchSoFar, flight: Flight) -> int:
        """Carry the share of kept groups to the next flight. Returns the prompts, in rounds."""
        self._keep_rate = self._rate(batch)
        return math.ceil(flight.admitted / self._section.prompts_requested)

    def _rate(self, batch: BatchSoFar) -> float:
        return batch.keep_rate(self._keep_rate, _PRIOR_GROUPS)


FILLINGS: Mapping[FinishBatch, Callable[[RolloutSection], Filling]] = {"all": WaitForAll, "enough": WaitForEnough}
