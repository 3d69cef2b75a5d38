"""The ways to fill a batch, one for each `rollout.finish_batch`: when it is complete, how many groups begin, and
whether each is a call of the engine by itself. A way answers; `BatchFiller` acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from megatron_daro.config.sections import FinishBatch, RolloutSection
from megatron_daro.rollout.batch_so_far import BatchSoFar
from megatron_daro.rollout.groups_under_way import Flight

_PRIOR_GROUPS = 8
"""Without rounds the share of kept groups begins at that of the flight before, which counts for so many groups. Else
one filtered group at the beginning would look like a filter that keeps nothing, and admit four times the prompts."""


class Filling(Protocol):
    """A way to fill a batch. Each `flight` begins with `wanted`. Whenever a call has ended, and its groups are in the
    batch, it is asked `is_enough`, and `wanted` if not. It is asked nothing meanwhile: for one that ends a batch by the
    clock `BatchFiller.fill` has to ask at that time, too (`_next_ended` waits for the end of a call, and where its
    limit is over the run ends).

    group_by_group: whether each group is a call of its own, so that a batch may end as soon as enough have ended; else
    those that begin together are one call.
    """

    group_by_group: bool

    def is_enough(self, batch: BatchSoFar, flight: Flight) -> bool:
        """Whether the batch is complete although groups are in flight. Not before it keeps a group."""
        ...

    def wanted(self, batch: BatchSoFar, flight: Flight, missing: int) -> int:
        """Return how many groups to begin (0 or fewer: none), so that the batch is likely to keep `missing` more:
        unfinished ones first (`old_and_new`), and where answers are made in segments all unfinished ones beside so many
        new ones. missing: to `prompts_per_batch`, the most that a batch trains. Groups in flight are still missing,
        so a way takes them off by itself; those that were set aside are not."""
        ...

    def prompts_left(self, flight: Flight) -> float:
        """Return how many new prompts may still be among them."""
        ...

    def flight_ended(self, batch: BatchSoFar, flight: Flight) -> int:
        """Take note of what was kept, and return how many rounds of prompts it took, for metrics and messages."""
        ...


def old_and_new(section: RolloutSection, unfinished: int, wanted: int) -> tuple[int, int]:
    """Return how many of the groups that the batch before left go on, and how many prompts begin. Where answers are
    made in segments all go on, beside new prompts. Args: wanted: > 0, of both; there of new ones alone."""
    if section.segment_tokens is not None:
        return unfinished, wanted
    old = min(unfinished, wanted)
    return old, wanted - old


class InRounds:
    """Groups begin in rounds. A round is one call (and tries for what is missing of it), as fits an engine that works
    on one at a time, and the next begins when all of its groups have ended. What is in a batch follows from the saved
    state and the answers alone: a run repeats exactly with an engine that does (embedded)."""

    group_by_group = False

    def __init__(self, section: RolloutSection) -> None:
        """Args: section: the configuration's."""
        self._section = section

    def is_enough(self, batch: BatchSoFar, flight: Flight) -> bool:
        """False: a round is waited for."""
        return False

    def wanted(self, batch: BatchSoFar, flight: Flight, missing: int) -> int:
        """0 while a round is in flight, and after the last."""
        if flight.calls or flight.times_begun > self._section.max_refill_rounds:
            return 0
        return math.ceil(missing * self._section.oversampling / batch.keep_rate())

    def prompts_left(self, flight: Flight) -> float:
        """No limit: rounds have one."""
        return math.inf

    def flight_ended(self, batch: BatchSoFar, flight: Flight) -> int:
        """Return the rounds."""
        return flight.times_begun


class Continuous:
    """Every group is a call of its own, as fits servers. One that the filter takes out is replaced while others are
    still generated. Enough trainable groups end the batch: the rest is aborted, and goes on in the next batch or is
    dropped. A run does not repeat exactly. A round is only a measure of prompts: oversampling x prompts_per_batch."""

    group_by_group = True

    def __init__(self, section: RolloutSection) -> None:
        """Args: section: the configuration's."""
        self._section = section
        self._keep_rate = 1.0

    def is_enough(self, batch: BatchSoFar, flight: Flight) -> bool:
        """With prompts_per_batch groups."""
        return len(batch.kept) >= self._section.prompts_per_batch

    def wanted(self, batch: BatchSoFar, flight: Flight, missing: int) -> int:
        """Those that are in flight count."""
        return math.ceil(missing * self._section.oversampling / self._rate(batch)) - len(flight.calls)

    def prompts_left(self, flight: Flight) -> float:
        """As many as 1 + max_refill_rounds rounds have."""
        return (1 + self._section.max_refill_rounds) * self._section.prompts_requested - flight.admitted

    def flight_ended(self, batch: BatchSoFar, flight: Flight) -> int:
        """Learn the share of kept groups for the next flight, and return the prompts, in rounds."""
        self._keep_rate = self._rate(batch)
        return math.ceil(flight.admitted / self._section.prompts_requested)

    def _rate(self, batch: BatchSoFar) -> float:
        return batch.keep_rate(self._keep_rate, _PRIOR_GROUPS)


FILLINGS: Mapping[FinishBatch, Callable[[RolloutSection], Filling]] = {"all": InRounds, "enough": Continuous}
