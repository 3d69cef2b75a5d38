"""Groups that are not complete: in flight, or unfinished between two batches. The states of a group:

    state        held by                                          ends as
    in flight    GroupInFlight in `Flight.calls`                  kept, filtered, dropped, or unfinished
    unfinished   UnfinishedGroup in the `Flight`, then the        in flight again in a later flight; dropped if it is
                 sampler and its Snapshot                         too old by then, or without keeps_waiting
    kept         Group in `BatchSoFar.kept`: complete, trainable  handed to the controller, or surplus
    surplus      Group in the sampler and its Snapshot: beyond    kept by the next batch; dropped if it is too old by
                 the target of its batch                          then, or without keeps_waiting
    trained, filtered, dropped: the final outcomes, in the ledger. Until it has one, a group is outstanding.

`keeps_waiting` of the configuration's rollout section is true with keep_surplus or segment_tokens.

Unfinished and surplus groups together are the groups that wait for the next batch; checkpoints hold them
(RecordedGroup). A rollout of a group is finished or partial. A partial one has the tokens that it had when it was
aborted, or when it was set aside because it had all the tokens that one flight gives it (rollout.segment_tokens).

Recorded groups that contradict themselves are refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import compress

from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import PromptSource
from megatron_daro.types import Group, Prompt, Rollout, Verdict


@dataclass(slots=True)
class GroupInFlight:
    """A group that is being completed.

    rollouts: finished ones by index. verdicts: of the verified ones, by index. partial: the partial ones by index; one
    that has all the tokens that this flight gives it has the finish reason "segment". tokens_before: by index, the
    response tokens that a rollout had when this flight began.
    """

    prompt: Prompt
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    partial: dict[int, Rollout] = field(default_factory=dict)
    tokens_before: dict[int, int] = field(default_factory=dict)

    def missing_rollouts(self, rollouts_per_prompt: int) -> tuple[int, ...]:
        """Return the indices without a finished rollout."""
        return tuple(i for i in range(rollouts_per_prompt) if i not in self.rollouts)

    def to_generate(self, rollouts_per_prompt: int) -> tuple[int, ...]:
        """Return the missing indices that this flight still generates: those that are not set aside."""
        set_aside = {i for i, rollout in self.partial.items() if rollout.finish_reason == "segment"}
        return tuple(i for i in self.missing_rollouts(rollouts_per_prompt) if i not in set_aside)

    def is_set_aside(self, rollouts_per_prompt: int) -> bool:
        """Whether rollouts are missing and all of them are set aside."""
        return bool(self.missing_rollouts(rollouts_per_prompt)) and not self.to_generate(rollouts_per_prompt)

    @property
    def unscored(self) -> bool:
        """Whether finished rollouts wait for their verdicts."""
        return len(self.verdicts) < len(self.rollouts)

    def group(self, group_id: int) -> Group:
        """Return the group with its finished and verified rollouts, in index order."""
        order = sorted(self.verdicts)
        return Group(
            group_id,
            self.prompt,
            tuple(self.rollouts[i] for i in order),
            tuple(self.verdicts[i] for i in order),
        )

    def unfinished(self, group_id: int) -> UnfinishedGroup:
        """Return the group as it is kept for a later flight, which goes on with what this one set aside."""
        partial = tuple(replace(self.partial[i], finish_reason="abort") for i in sorted(self.partial))
        return UnfinishedGroup(self.group(group_id), partial)


@dataclass(frozen=True, slots=True, eq=False)
class UnfinishedGroup:
    """A group between two flights: one left it unfinished, a later one may continue it.

    finished: the finished rollouts with their verdicts, maybe none. partial: the unfinished ones that have tokens, in
    index order.
    """

    finished: Group
    partial: tuple[Rollout, ...] = ()

    @property
    def group_id(self) -> int:
        """The group's id."""
        return self.finished.group_id

    @property
    def weight_version(self) -> int | None:
        """The oldest policy version that produced one of its tokens; None while it has none."""
        return min((r.weight_version for r in (*self.finished.rollouts, *self.partial)), default=None)

    @property
    def generated_tokens(self) -> int:
        """Generated tokens so far."""
        return sum(r.generated_length for r in (*self.finished.rollouts, *self.partial))

    def in_flight(self) -> GroupInFlight:
        """Return the same group, to be completed in a flight."""
        group = self.finished
        return GroupInFlight(
            group.prompt,
            rollouts={r.index: r for r in group.rollouts},
            verdicts={r.index: v for r, v in zip(group.rollouts, group.verdicts, strict=True)},
            partial={r.index: r for r in self.partial},
            tokens_before={r.index: r.response_length for r in self.partial},
        )

    def to_record(self) -> RecordedGroup:
        """Return the group as a checkpoint holds it; `from_record` gives exactly the same group back."""
        return RecordedGroup(self.finished, None, self.partial)

    @classmethod
    def from_record(cls, record: RecordedGroup, rollouts_per_prompt: int) -> UnfinishedGroup:
        """Return the inverse of `to_record`. Raises ValueError where the rollouts contradict each other."""
        finished, rollouts = record.group, record.partial
        indices = [r.index for r in (*finished.rollouts, *rollouts)]
        allowed = range(rollouts_per_prompt)
        if len(finished.rollouts) == len(allowed) or len({*indices}) < len(indices) or not {*indices} <= {*allowed}:
            raise ValueError(
                f"group {finished.group_id}: unfinished with the rollouts {indices}, {len(finished.rollouts)} of them "
                f"finished; allowed: each of 0 to {allowed[-1]} once at most, not all finished"
            )
        if not all(r.is_finished for r in finished.rollouts) or any(r.is_finished for r in rollouts):
            raise ValueError(f"group {finished.group_id}: a rollout is finished and aborted at once")
        return cls(finished, rollouts)


def without_lost_experts(record: RecordedGroup) -> RecordedGroup:
    """Return a group that waits in a checkpoint, without the rollouts whose files of experts are gone: a step after the
    checkpoint removed these when the group was filtered or dropped, trained without being recorded, or trained after
    the answer was started over."""
    there = [r.routed_experts is None or r.routed_experts.is_there for r in record.group.rollouts]
    group = replace(
        record.group,
        rollouts=tuple(compress(record.group.rollouts, there)),
        verdicts=tuple(compress(record.group.verdicts, there)),
    )
    partial = tuple(r for r in record.partial if r.routed_experts is None or r.routed_experts.is_there)
    return replace(record, group=group, partial=partial)


@dataclass(slots=True)
class Flight:
    """What is in flight during one `BatchFiller.fill`.

    to_resume: groups that the previous `fill` left unfinished and that are not in flight again yet. calls: the running
    calls, with the groups that each generates. arrivals: calls that have ended; and None, a sign of life, for every
    answer to one of several requests of a call. resumed: ids of the groups that continue from earlier flights.
    unfinished: groups that were set aside, or aborted at the end.
    incomplete: (group, missing rollouts) after the last attempt. times_begun: how often groups were begun. admitted:
    prompts admitted so far. stopping: nothing more is asked of the engine.
    """

    to_resume: deque[UnfinishedGroup]
    calls: dict[asyncio.Task[None], dict[int, GroupInFlight]] = field(default_factory=dict)
    arrivals: asyncio.Queue[asyncio.Task[None] | None] = field(default_factory=asyncio.Queue)
    resumed: set[int] = field(default_factory=set)
    unfinished: list[UnfinishedGroup] = field(default_factory=list)
    incomplete: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    times_begun: int = 0
    admitted: int = 0
    stopping: bool = False

    def group_ids(self) -> list[int]:
        """Return the ids of the groups in flight, in order."""
        return sorted(group_id for groups in self.calls.values() for group_id in groups)


def admit(source: PromptSource, ledger: Ledger, count: int) -> dict[int, GroupInFlight]:
    """Enter the next `count` prompts into the books and return their groups, by id. Raises DataError if prompts run
    out."""
    prompts = source.next(count)
    if len(prompts) != count:
        raise DataError(f"the prompt source gave {len(prompts)} prompts instead of {count}; it must not end")
    return {i: GroupInFlight(prompt) for i, prompt in zip(ledger.admit(count), prompts, strict=True)}
