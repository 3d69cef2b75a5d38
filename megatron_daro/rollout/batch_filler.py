"""Fills a batch: begins groups and takes in those that end, until the batch is complete. One loop, of which
`finish_batch` decides when the batch ends, when groups begin, and which of them are one call of the engine:

    finish_batch="all"     groups begin in rounds. A round is one call of the engine, as fits one that works on one
                           batch at a time, and the next begins when all of its groups have ended. What is in a batch
                           follows from the saved state alone, so a run repeats exactly.
    finish_batch="enough"  every group is a call of its own, as fits servers. A group that the filter takes out is
                           replaced while others are still generated. Enough trainable groups end the batch: the rest is
                           aborted, and goes on in the next batch or is dropped. A run does not repeat exactly. A
                           round is only a measure of prompts here: oversampling x prompts_per_batch.

`fill` waits for the next arrival of all calls; each call waits for its engine, and its verdicts are made meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_daro.config.sections import FinishBatch, RolloutSection
from megatron_daro.errors import DaroError
from megatron_daro.rollout.batch_so_far import BatchSoFar
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.deadlines import Deadlines, first_cause, mark_as_seen
from megatron_daro.rollout.groups_under_way import GroupInFlight, UnfinishedGroup, admit
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import Notices, PromptSource, Rollouter
from megatron_daro.types import GroupRequest

_PRIOR_GROUPS = 8
"""Without rounds the share of kept groups begins at that of the batch before, which counts for so many groups. Else one
filtered group at the beginning would look like a filter that keeps nothing, and admit four times the prompts."""

_MAX_ATTEMPTS = 3
"""Times that a group's missing rollouts are requested before the group is dropped."""

_BURST = 64
"""Calls that are begun in one turn of the event loop, which a thousand would hold for 0.3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What groups are made of.

    section: the configuration's rollout section. rollouter: generates and scores. source: gives prompts.
    ledger: the books. collector: takes answers in and has them scored. notices: told about dropped groups.
    """

    section: RolloutSection
    rollouter: Rollouter
    source: PromptSource
    ledger: Ledger
    collector: RolloutCollector
    notices: Notices
    deadlines: Deadlines


@dataclass(slots=True)
class _Flight:
    """What is in flight of one batch.

    to_resume: groups that the batch before left unfinished, not begun again yet. calls: those that run, with the groups
    that each generates. arrivals: a call that has ended, or None: the rollouts of one group of a call of several came
    in. unfinished: groups that were set aside, or aborted at the end. incomplete: (group, rollouts it lacks) after the
    last attempt. times_begun: times that groups were begun. admitted: prompts so far. stopping: nothing more is asked
    of the engine.
    """

    to_resume: deque[UnfinishedGroup]
    calls: dict[asyncio.Task[None], dict[int, GroupInFlight]] = field(default_factory=dict)
    arrivals: asyncio.Queue[asyncio.Task[None] | None] = field(default_factory=asyncio.Queue)
    unfinished: list[UnfinishedGroup] = field(default_factory=list)
    incomplete: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    times_begun: int = 0
    admitted: int = 0
    stopping: bool = False

    def group_ids(self) -> list[int]:
        """Groups that are generated now, in order."""
        return sorted(group_id for groups in self.calls.values() for group_id in groups)


# Of each `rollout.finish_batch`: whether groups begin in rounds, each of which is one call; and whether a batch may be
# complete before all that were begun are.
_WAYS: Mapping[FinishBatch, tuple[bool, bool]] = {"all": (True, False), "enough": (False, True)}


class BatchFiller:
    """Keeps groups in flight until the batch is complete."""

    def __init__(self, context: RolloutContext, finish_batch: FinishBatch) -> None:
        """Start nothing."""
        self._context, self._section = context, context.section
        self._size = context.section.rollouts_per_prompt
        self._in_rounds, self._ends_early = _WAYS[finish_batch]
        self._keep_rate = 1.0

    @property
    def may_leave_unfinished(self) -> bool:
        """Whether groups may be unfinished when their batch is complete."""
        return self._ends_early or self._section.segment_tokens is not None

    async def fill(self, batch: BatchSoFar, unfinished: Sequence[UnfinishedGroup]) -> tuple[UnfinishedGroup, ...]:
        """Add groups to the batch until it is complete. The first failure ends everything that is in flight.

        Args:
            batch: the batch so far.
            unfinished: outstanding groups that the batch before left; they go on before new prompts are admitted.

        Returns:
            The groups that are unfinished now, by id, still outstanding. None of them is generated any more.

        Raises:
            DataError: no prompts. EngineError, RewardError, DeadlineError: the engine or the verifiers failed.
        """
        flight = _Flight(deque(unfinished))
        try:
            await self._begin_groups(batch, flight)
            while not self._is_complete(batch, flight):
                call = await self._next_arrival(flight)
                if call is not None:
                    self._take_groups(batch, flight, call)
                    await self._begin_groups(batch, flight)
            if flight.calls:
                await self._abort_in_flight(batch, flight)
        finally:
            await self._end(flight)
        batch.rounds += self._rounds_of(flight)
        self._keep_rate = self._rate_of(batch)
        self._warn_incomplete(flight)
        return tuple(sorted((*flight.to_resume, *flight.unfinished), key=lambda group: group.group_id))

    # Decisions: when a batch is complete depends on these and on `may_leave_unfinished` alone; how groups begin and are
    # asked for depends on `_in_rounds` too (`_begin_groups`, `_attempt`).

    def _is_complete(self, batch: BatchSoFar, flight: _Flight) -> bool:
        """Whether the batch waits for nothing any more. What is in flight then is aborted.

        A batch that ends by another rule (a time, say) ends here, and says so in `_ends_early`; not before it keeps a
        group, or the sampler begins again. Where no arrival brings the moment about,
        `flight.arrivals.put_nowait(None)` wakes the loop.
        """
        enough = self._ends_early and len(batch.kept) >= self._section.prompts_per_batch
        return enough or not flight.calls

    def _groups_wanted(self, batch: BatchSoFar, flight: _Flight) -> int:
        """Groups to begin now, beside those in flight: as many as the missing ones are likely to need, given how many
        the filter keeps."""
        # An unfinished group will be in a later batch: a prompt in its place would only wait as well.
        missing = self._section.prompts_per_batch - len(batch.kept) - len(flight.unfinished)
        if missing <= 0:
            return 0
        if self._in_rounds and (flight.calls or flight.times_begun > self._section.max_refill_rounds):
            return 0
        return math.ceil(missing * self._section.oversampling / self._rate_of(batch)) - len(flight.calls)

    def _prompts_allowed(self, flight: _Flight) -> float:
        """Prompts that may still be admitted: as many as 1 + max_refill_rounds rounds have.
        Where groups begin in rounds, the number of these is bounded instead."""
        if self._in_rounds:
            return math.inf
        return (1 + self._section.max_refill_rounds) * self._section.prompts_requested - flight.admitted

    def _rate_of(self, batch: BatchSoFar) -> float:
        """Share of groups that the filter keeps; in rounds a function of this batch alone."""
        return batch.keep_rate() if self._in_rounds else batch.keep_rate(self._keep_rate, _PRIOR_GROUPS)

    def _in_calls(self, groups: dict[int, GroupInFlight]) -> list[dict[int, GroupInFlight]]:
        """Which groups are asked of the engine together."""
        return [groups] if self._in_rounds else [{i: entry} for i, entry in groups.items()]

    def _rounds_of(self, flight: _Flight) -> int:
        """How many rounds of prompts it took so far, as metrics and messages tell."""
        return flight.times_begun if self._in_rounds else math.ceil(flight.admitted / self._section.prompts_requested)

    # Acting on them.

    async def _begin_groups(self, batch: BatchSoFar, flight: _Flight) -> None:
        """Begin the groups that are wanted, first those to resume."""
        wanted = self._groups_wanted(batch, flight)
        if wanted <= 0:
            return
        flight.times_begun += 1
        groups: dict[int, GroupInFlight] = {}
        segments = self._section.segment_tokens is not None  # then all go on, beside new ones
        while flight.to_resume and (segments or wanted > 0):
            group = flight.to_resume.popleft()
            self._context.ledger.resume(group.group_id)
            self._context.collector.counters.groups_resumed += 1
            groups[group.group_id] = group.in_flight()
            wanted -= not segments
        count = int(min(wanted, self._prompts_allowed(flight)))
        if count > 0:
            flight.admitted += count
            groups |= admit(self._context.source, self._context.ledger, count)
        for together in self._in_calls(groups):
            task = asyncio.create_task(self._generate(flight, together))
            flight.calls[task] = together
            task.add_done_callback(flight.arrivals.put_nowait)
            if len(flight.calls) % _BURST == 0:
                await asyncio.sleep(0)

    async def _generate(self, flight: _Flight, groups: dict[int, GroupInFlight]) -> None:
        """Ask for these groups; then, directly after it, for what is still missing, up to the last attempt."""
        for attempt in range(_MAX_ATTEMPTS):
            wanted = {i: entry for i, entry in groups.items() if entry.wanted(self._size)}
            if flight.stopping or not wanted:
                return
            if attempt > 0:
                for group_id in wanted:
                    self._context.ledger.retry(group_id)
            requests = [self._context.collector.request(i, entry) for i, entry in wanted.items()]
            await self._attempt(flight, requests, groups)

    async def _attempt(
        self, flight: _Flight, requests: Sequence[GroupRequest], groups: dict[int, GroupInFlight]
    ) -> None:
        """One call of the engine; answers are verified while others are still generated."""
        collector = self._context.collector
        iterator = self._context.rollouter.generate(requests)
        try:
            async with asyncio.TaskGroup() as scoring:
                # No deadline of its own: it may wait behind others. `_next_arrival` waits for the next of them all.
                async for rollouts in iterator:
                    finished = collector.accept(rollouts, groups)
                    if len(requests) == 1:  # nothing is generated meanwhile, and its end is its arrival
                        await collector.score(finished, groups)
                    else:
                        flight.arrivals.put_nowait(None)
                        scoring.create_task(collector.score(finished, groups))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await collector.close(iterator)

    async def _next_arrival(self, flight: _Flight) -> asyncio.Task[None] | None:
        """Wait for the end of a call, or for all rollouts of one of its groups (None)."""
        what = f"the engine, with {len(flight.calls)} calls in flight"
        return await self._context.deadlines.within("generate", flight.arrivals.get(), what=what)

    def _take_groups(self, batch: BatchSoFar, flight: _Flight, call: asyncio.Task[None]) -> None:
        """Take the groups of a call that ended, by id. Raises what ended it."""
        groups = flight.calls.pop(call)
        if call.done() and not call.cancelled():
            call.result()
        for group_id, entry in sorted(groups.items()):
            missing = entry.missing(self._size)
            aborted = flight.stopping and (missing or entry.unscored)
            if aborted or entry.is_set_aside(self._size):
                self._context.collector.counters.groups_aborted += bool(aborted)
                flight.unfinished.append(entry.unfinished(group_id))
                continue
            if missing:
                flight.incomplete.append((group_id, missing))
                self._context.collector.discard(entry.unfinished(group_id))
            batch.classify(entry.group(group_id), not missing)

    async def _abort_in_flight(self, batch: BatchSoFar, flight: _Flight) -> None:
        """Abort what is in flight, since the batch is complete. Groups that were about to end are surplus."""
        flight.stopping = True
        ids, deadlines = flight.group_ids(), self._context.deadlines
        await deadlines.within("abort", self._context.rollouter.abort(ids), what=f"{len(ids)} groups in flight")
        _, late = await asyncio.wait(flight.calls, timeout=deadlines.abort)
        scoring = {call for call in late if any(entry.unscored for entry in flight.calls[call].values())}
        if scoring:  # All that is left of it is verification, which has its own deadline.
            await asyncio.wait(scoring, timeout=deadlines.score)
        stuck = [call for call in flight.calls if not call.done()]
        if stuck:
            self._context.notices.warn(
                f"{len(stuck)} groups did not end within {deadlines.abort:g} s of their abort (the first: group "
                f"{min(flight.calls[stuck[0]])}); they are left behind with what they have. Look at the engine's log"
            )
            await self._cancel(stuck)
        while not flight.arrivals.empty():
            call = flight.arrivals.get_nowait()
            if call is not None:
                self._take_groups(batch, flight, call)
        for call in list(flight.calls):  # Did not even end when it was cancelled.
            self._take_groups(batch, flight, call)

    async def _end(self, flight: _Flight) -> None:
        """After a failure or a cancellation: nothing of this batch may go on. The cause is what is raised."""
        if not flight.calls:
            return
        flight.stopping = True
        ids = flight.group_ids()
        try:
            await self._context.deadlines.within("abort", self._context.rollouter.abort(ids), what=f"{len(ids)} groups")
        except DaroError as error:
            self._context.notices.warn(f"{len(ids)} groups could not be aborted: {error}")
        finally:
            await self._cancel(list(flight.calls))

    async def _cancel(self, calls: Sequence[asyncio.Task[None]]) -> None:
        """Cancel and wait, not for ever: closing an iterator may take the whole deadline of an abort."""
        for call in calls:
            call.cancel()
        await asyncio.wait(calls, timeout=2 * self._context.deadlines.abort)
        for call in calls:
            if call.done():
                mark_as_seen(call)  # Another error, or the cancellation, is the one that is raised.

    def _warn_incomplete(self, flight: _Flight) -> None:
        if flight.incomplete:
            group_id, missing = flight.incomplete[0]
            self._context.notices.warn(
                f"{len(flight.incomplete)} groups were still incomplete after {_MAX_ATTEMPTS} attempts "
                f"and are dropped (the first: group {group_id}, rollouts {list(missing)})"
            )
