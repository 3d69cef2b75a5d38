"""Fills a batch: begins groups and takes in those that have ended, until the batch is complete. filling.py decides how
many groups begin, which of them share an engine call, and when the batch is complete. However it was filled, a batch
trains at most `prompts_per_batch` groups (sampler.py).

`fill` waits for the next engine call to end. Within a call, answers are scored while others are still generated.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_daro.config.sections import FinishBatch, RolloutSection
from megatron_daro.deadlines import TRIES, Deadlines, first_cause, mark_as_seen
from megatron_daro.errors import DaroError
from megatron_daro.rollout.batch_so_far import BatchSoFar
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.filling import FILLINGS, old_and_new
from megatron_daro.rollout.groups_under_way import Flight, GroupInFlight, UnfinishedGroup, admit
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import Notices, PromptSource, Rollouter
from megatron_daro.types import GroupRequest

_BURST = 64
"""Calls begun before the event loop gets a turn: beginning a thousand would block it for 0.3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What sampling works with.

    section: the configuration's rollout section. rollouter: generates and scores. prompts: where new ones come from.
    ledger: the books. collector: takes answers in and has them scored. notices: for warnings about dropped groups.
    deadlines: of what is awaited.
    """

    section: RolloutSection
    rollouter: Rollouter
    prompts: PromptSource
    ledger: Ledger
    collector: RolloutCollector
    notices: Notices
    deadlines: Deadlines


class BatchFiller:
    """Keeps groups in flight until the batch is complete."""

    def __init__(self, parts: RolloutParts, finish_batch: FinishBatch) -> None:
        """Start nothing."""
        self._parts, self._section = parts, parts.section
        self._size = parts.section.rollouts_per_prompt
        self._filling = FILLINGS[finish_batch](parts.section)

    async def fill(self, batch: BatchSoFar, unfinished: Sequence[UnfinishedGroup]) -> tuple[UnfinishedGroup, ...]:
        """Add groups to the batch until it is complete. The first failure ends everything that is in flight.

        Args:
            batch: the batch so far.
            unfinished: outstanding groups that the last `fill` left; they continue before new prompts begin.

        Returns:
            The groups that are unfinished now, sorted by id. They are not in flight (late answers of a call that did
            not end are refused), but still outstanding in the ledger, and the caller keeps or drops them.

        Raises:
            DataError: no prompts. EngineError, WorkerError, RewardError, RolloutError, DeadlineError: engine, verifiers
            or environment failed.
        """
        flight = Flight(deque(unfinished))
        try:
            await self._begin_groups(batch, flight)
            while flight.calls:
                self._take_groups(batch, flight, await self._next_ended(flight))
                if batch.kept and self._filling.is_enough(batch, flight):
                    break
                await self._begin_groups(batch, flight)
            if flight.calls:
                await self._abort_in_flight(batch, flight)
        finally:
            await self._end(flight)
        batch.rounds += self._filling.flight_ended(batch, flight)
        self._warn_incomplete(flight)
        return tuple(sorted((*flight.to_resume, *flight.unfinished), key=lambda group: group.group_id))

    async def _begin_groups(self, batch: BatchSoFar, flight: Flight) -> None:
        """Begin the groups that are wanted, beside those in flight."""
        # A new group that this flight set aside is not replaced in it: the replacement would only wait as well.
        set_aside = [group for group in flight.unfinished if group.group_id not in flight.resumed]
        missing = self._section.prompts_per_batch - len(batch.kept) - len(set_aside)
        wanted = max(self._filling.wanted(batch, flight, missing), 0)
        resumed, prompts = old_and_new(self._section, len(flight.to_resume), wanted)
        groups = self._resume(flight, resumed) | self._admit(flight, prompts)
        if not groups:
            return
        flight.times_begun += 1
        calls = [{group_id: entry} for group_id, entry in groups.items()] if self._filling.group_by_group else [groups]
        for together in calls:
            task = asyncio.create_task(self._generate(flight, together))
            flight.calls[task] = together
            task.add_done_callback(flight.arrivals.put_nowait)
            if len(flight.calls) % _BURST == 0:
                await asyncio.sleep(0)

    def _resume(self, flight: Flight, count: int) -> dict[int, GroupInFlight]:
        """Return so many groups that the last `fill` left unfinished, by id."""
        groups = [flight.to_resume.popleft() for _ in range(count)]
        for group in groups:
            self._parts.ledger.resume(group.group_id)
            flight.resumed.add(group.group_id)
            self._parts.collector.counters.groups_resumed += 1
        return {group.group_id: group.in_flight() for group in groups}

    def _admit(self, flight: Flight, count: int) -> dict[int, GroupInFlight]:
        """Return groups of so many new prompts, fewer where the flight may begin no more, by id."""
        count = int(min(count, self._filling.prompts_left(flight)))
        if count <= 0:
            return {}
        flight.admitted += count
        return admit(self._parts.prompts, self._parts.ledger, count)

    async def _generate(self, flight: Flight, groups: dict[int, GroupInFlight]) -> None:
        """Generate these groups, and retry at once what they still lack, up to the last attempt."""
        for tried in range(TRIES):
            left = {i: entry for i, entry in groups.items() if entry.to_generate(self._size)}
            if flight.stopping or not left:
                return
            if tried > 0:
                for group_id in left:
                    self._parts.ledger.retry(group_id)
            requests = [self._parts.collector.request(i, entry) for i, entry in left.items()]
            await self._attempt(flight, requests, groups)

    async def _attempt(
        self, flight: Flight, requests: Sequence[GroupRequest], groups: dict[int, GroupInFlight]
    ) -> None:
        """Make one engine call; its answers are scored while others are still generated."""
        collector = self._parts.collector
        iterator = self._parts.rollouter.generate(requests)
        try:
            async with asyncio.TaskGroup() as scoring:
                # No deadline here: a call may queue behind others. `_next_ended` has one, for the next sign of any.
                async for rollouts in iterator:
                    finished = collector.accept(rollouts, groups)
                    if len(requests) == 1:  # its only group: nothing else is generated meanwhile
                        await collector.score(finished, groups)
                    else:
                        flight.arrivals.put_nowait(None)
                        scoring.create_task(collector.score(finished, groups))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await collector.close(iterator)

    async def _next_ended(self, flight: Flight) -> asyncio.Task[None]:
        """Return the next call that ends. A None in between only shows that a call makes progress."""
        what, call = f"the engine, with {len(flight.calls)} calls in flight", None
        while call is None:
            call = await self._parts.deadlines.within("next_group", flight.arrivals.get(), what=what)
        return call

    def _take_groups(self, batch: BatchSoFar, flight: Flight, call: asyncio.Task[None]) -> None:
        """Take in the groups of a call that has ended or is left behind, in order of their ids. Raises its error."""
        groups = flight.calls.pop(call)
        if call.done() and not call.cancelled():
            call.result()
        for group_id, entry in sorted(groups.items()):
            missing = entry.missing_rollouts(self._size)
            aborted = flight.stopping and (missing or entry.unscored)
            if aborted or entry.is_set_aside(self._size):
                self._parts.collector.counters.groups_aborted += bool(aborted)
                self._parts.collector.count_unscored(entry)
                flight.unfinished.append(entry.unfinished(group_id))
                continue
            if missing:
                flight.incomplete.append((group_id, missing))
                self._parts.collector.count_discarded(entry.unfinished(group_id))
            batch.classify(entry.group(group_id), not missing)

    async def _abort_in_flight(self, batch: BatchSoFar, flight: Flight) -> None:
        """Abort what is in flight, since the batch is complete. Groups that end all the same may become surplus."""
        flight.stopping = True
        ids, deadlines = flight.group_ids(), self._parts.deadlines
        await deadlines.within("abort", self._parts.rollouter.abort(ids), what=f"{len(ids)} groups in flight")
        aborted = time.monotonic()
        _, late = await asyncio.wait(flight.calls, timeout=deadlines.abort)
        scoring = {call for call in late if any(entry.unscored for entry in flight.calls[call].values())}
        if scoring:  # Scoring is left, and then a teacher. The batch is complete: what takes longer is left behind.
            await asyncio.wait(scoring, timeout=deadlines.score)
        stuck = [call for call in flight.calls if not call.done()]
        if stuck:
            groups = sorted(group_id for call in stuck for group_id in flight.calls[call])
            self._parts.notices.warn(
                f"{len(groups)} groups did not end within {time.monotonic() - aborted:.0f} s of their abort (the "
                f"first: group {groups[0]}); they are left behind with what is finished and scored. "
                "Look at the log of the engine, or of the teacher"
            )
            await self._cancel(stuck)
        while not flight.arrivals.empty():
            call = flight.arrivals.get_nowait()
            if call is not None:
                self._take_groups(batch, flight, call)
        for call in list(flight.calls):  # those that did not even end when they were cancelled
            self._take_groups(batch, flight, call)

    async def _end(self, flight: Flight) -> None:
        """End everything in flight after a failure or a cancellation, which stays the error that is raised."""
        if not flight.calls:
            return
        flight.stopping = True
        ids = flight.group_ids()
        try:
            await self._parts.deadlines.within("abort", self._parts.rollouter.abort(ids), what=f"{len(ids)} groups")
        except DaroError as error:
            self._parts.notices.warn(f"{len(ids)} groups could not be aborted: {error}")
        finally:
            await self._cancel(list(flight.calls))

    async def _cancel(self, calls: Sequence[asyncio.Task[None]]) -> None:
        """Cancel calls and wait for their ends; closing one's iterator may take the whole deadline of an abort."""
        for call in calls:
            call.cancel()
        await asyncio.wait(calls, timeout=2 * self._parts.deadlines.abort)
        for call in calls:
            if call.done():
                mark_as_seen(call)  # the error that is raised is another one, or the cancellation

    def _warn_incomplete(self, flight: Flight) -> None:
        if flight.incomplete:
            group_id, missing = flight.incomplete[0]
            self._parts.notices.warn(
                f"{len(flight.incomplete)} groups were still incomplete after {TRIES} tries "
                f"and are dropped (the first: group {group_id}, rollouts {list(missing)})"
            )
