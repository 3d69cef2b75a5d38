"""Fills a batch from a fleet of servers: every group is its own call, and enough groups end the batch.

Place in the data flow: prompts -> one task per group (engine, intake, retries) -> draft, in the order in which groups
end. Groups that the filter takes out are replaced while the others are still generated, so that the servers stay busy;
when the batch is full, what is unfinished is aborted and kept in part, or dropped. What is in a batch depends on who
is fast: a run does not repeat exactly (rounds.py does). It refuses to wait for the slowest group of a full batch.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_daro.errors import DaroError
from megatron_daro.rollout.draft import Draft
from megatron_daro.rollout.filling import Filling
from megatron_daro.rollout.pending import PartialGroup, Pending, admit

_PRIOR_GROUPS = 8
"""The share of kept groups begins at that of the batch before, which counts for so many groups. Without it, one
filtered group at the beginning would look like a filter that keeps nothing, and admit four times the prompts."""


@dataclass(slots=True)
class _Flight:
    """What one batch has under way.

    waiting: groups kept from the batch before, not begun again yet. entries: in flight. ended: tasks in the order in
    which they ended. given_up: (group, rollouts it lacks) after the last attempt. unfinished: aborted at the end.
    """

    waiting: deque[PartialGroup]
    entries: dict[int, Pending] = field(default_factory=dict)
    tasks: dict[asyncio.Task[None], int] = field(default_factory=dict)
    ended: asyncio.Queue[asyncio.Task[None]] = field(default_factory=asyncio.Queue)
    unfinished: dict[int, Pending] = field(default_factory=dict)
    given_up: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    admitted: int = 0
    stopping: bool = False


class EarlyFill:
    """Keeps groups in flight until enough of them are trainable."""

    keeps_unfinished = True

    def __init__(self, filling: Filling) -> None:
        """Start nothing."""
        self._filling = filling
        self._keep_rate = 1.0

    async def fill(self, draft: Draft, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """See `BatchFiller.fill`. The first failure ends everything that is in flight."""
        flight = _Flight(deque(waiting))
        try:
            self._top_up(draft, flight)
            while flight.tasks and len(draft.kept) < self._filling.section.prompts_per_step:
                self._land(draft, flight, await self._next_end(flight))
                self._top_up(draft, flight)
            if flight.tasks:
                await self._recall(draft, flight)
        finally:
            await self._end(flight)
        self._keep_rate = draft.keep_rate(self._keep_rate, _PRIOR_GROUPS)
        draft.rounds += math.ceil(flight.admitted / self._filling.section.prompts_requested)
        self._say_given_up(flight)
        kept = [*flight.waiting, *(entry.kept(i) for i, entry in flight.unfinished.items())]
        return tuple(sorted(kept, key=lambda group: group.group_id))

    def _top_up(self, draft: Draft, flight: _Flight) -> None:
        """Begins groups until as many are in flight as the missing ones are likely to need; kept ones come first."""
        section = self._filling.section
        missing = section.prompts_per_step - len(draft.kept)
        if missing <= 0:
            return
        rate = draft.keep_rate(self._keep_rate, _PRIOR_GROUPS)
        wanted = math.ceil(missing * section.oversampling / rate) - len(flight.tasks)
        while wanted > 0 and flight.waiting:
            group = flight.waiting.popleft()
            self._filling.ledger.resume(group.group_id)
            self._filling.intake.groups_resumed += 1
            self._launch(flight, group.group_id, group.pending())
            wanted -= 1
        bound = (1 + section.max_refill_rounds) * section.prompts_requested
        count = min(wanted, bound - flight.admitted)
        if count > 0:
            flight.admitted += count
            for group_id, entry in admit(self._filling.source, self._filling.ledger, count).items():
                self._launch(flight, group_id, entry)

    def _launch(self, flight: _Flight, group_id: int, entry: Pending) -> None:
        task = asyncio.create_task(self._complete(flight, group_id, entry), name=f"group {group_id}")
        flight.entries[group_id] = entry
        flight.tasks[task] = group_id
        task.add_done_callback(flight.ended.put_nowait)

    async def _complete(self, flight: _Flight, group_id: int, entry: Pending) -> None:
        """One group: all attempts that it needs, one directly after the other."""
        for attempt in range(self._filling.max_attempts):
            if flight.stopping or not entry.missing(self._filling.section.rollouts_per_prompt):
                return
            if attempt > 0:
                self._filling.ledger.retry(group_id)
            iterator = self._filling.engine.generate([self._filling.intake.request(group_id, entry)])
            try:
                # No deadline of its own: it may wait behind others. `_next_end` waits for the next of them all.
                async for rollouts in iterator:
                    finished = self._filling.intake.accept(rollouts, {group_id: entry})
                    if finished:
                        await self._filling.intake.score(finished, {group_id: entry})
            finally:
                await self._filling.intake.close(iterator)

    async def _next_end(self, flight: _Flight) -> asyncio.Task[None]:
        what = f"the engine, with {len(flight.tasks)} groups in flight"
        return await self._filling.deadlines.within("generate", flight.ended.get(), what=what)

    def _land(self, draft: Draft, flight: _Flight, task: asyncio.Task[None]) -> None:
        """Take a group out of the air. Raises what ended its task."""
        group_id = flight.tasks.pop(task)
        entry = flight.entries.pop(group_id)
        missing = entry.missing(self._filling.section.rollouts_per_prompt)
        if task.done() and not task.cancelled():
            task.result()
        if flight.stopping and (missing or entry.unscored):
            self._filling.intake.groups_aborted += 1
            flight.unfinished[group_id] = entry
            return
        if missing:
            flight.given_up.append((group_id, missing))
            self._filling.intake.give_up(entry.kept(group_id))
        draft.classify(entry.group(group_id), not missing)

    async def _recall(self, draft: Draft, flight: _Flight) -> None:
        """Abort what is in flight, since the batch is full. Groups that were about to end are surplus."""
        flight.stopping = True
        what = f"{len(flight.tasks)} unfinished groups"
        await self._filling.deadlines.within("abort", self._filling.engine.abort(sorted(flight.entries)), what=what)
        _, late = await asyncio.wait(flight.tasks, timeout=self._filling.deadlines.abort)
        scoring = {task for task in late if flight.entries[flight.tasks[task]].unscored}
        if scoring:  # All that is left of it is verification, which has its own deadline.
            await asyncio.wait(scoring, timeout=self._filling.deadlines.score)
        stuck = [task for task in flight.tasks if not task.done()]
        if stuck:
            self._filling.notices.warn(
                f"{len(stuck)} groups did not end within {self._filling.deadlines.abort:g} s of their abort (the "
                f"first: group {flight.tasks[stuck[0]]}); they are left behind with what they have. "
                "Look at the engine's log"
            )
            await self._cancel(stuck)
        while not flight.ended.empty():
            self._land(draft, flight, flight.ended.get_nowait())
        for task in list(flight.tasks):  # Did not even end when it was cancelled.
            self._land(draft, flight, task)

    async def _end(self, flight: _Flight) -> None:
        """After a failure or a cancellation: nothing of this batch may go on. The cause is what is raised."""
        if not flight.tasks:
            return
        flight.stopping = True
        ids = sorted(flight.entries)
        try:
            await self._filling.deadlines.within("abort", self._filling.engine.abort(ids), what=f"{len(ids)} groups")
        except DaroError as error:
            self._filling.notices.warn(f"{len(ids)} groups could not be aborted: {error}")
        finally:
            await self._cancel(list(flight.tasks))

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel and wait, not for ever: closing an iterator may take the whole deadline of an abort."""
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=2 * self._filling.deadlines.abort)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # Marks it as seen: another error, or the cancellation, is the one that is raised.

    def _say_given_up(self, flight: _Flight) -> None:
        if flight.given_up:
            group_id, missing = flight.given_up[0]
            self._filling.notices.warn(
                f"{len(flight.given_up)} groups were still incomplete after {self._filling.max_attempts} attempts and "
                f"are dropped (the first: group {group_id}, rollouts {list(missing)})"
            )
