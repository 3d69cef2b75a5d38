"""From groups to a full batch: `Rounds`, which repeats exactly, and `EarlyFill`, which waits for nobody.

The composition root makes a RolloutContext and chooses one BatchFiller over it; the sampler asks that one to fill its
batches. In rounds every round is one pass of the engine and waits for all of its groups, so what is in a batch depends
on the state alone. From a fleet of servers every group is its own call; groups that the filter takes out are replaced
while the others are still generated, and enough groups end the batch: what is unfinished is aborted and kept in part,
or dropped, and a run does not repeat exactly.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_daro.config.sections import RolloutSection
from megatron_daro.errors import DaroError
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.deadlines import Deadlines, first_cause
from megatron_daro.rollout.groups_under_way import PartialGroup, Pending, admit
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.partial_batch import PartialBatch
from megatron_daro.rollout.protocol import Notices, PromptSource, Rollouter
from megatron_daro.types import GroupRequest, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What groups are made of.

    section: the configuration's rollout section. rollouter: generates and scores. source: gives prompts.
    ledger: the books. collector: takes answers in and has them scored. notices: told about dropped groups.
    max_attempts: times that a group's missing rollouts are requested before the group is dropped.
    """

    section: RolloutSection
    rollouter: Rollouter
    source: PromptSource
    ledger: Ledger
    collector: RolloutCollector
    notices: Notices
    deadlines: Deadlines
    max_attempts: int = 3


class BatchFiller(Protocol):
    """One way to fill a batch."""

    keeps_unfinished: bool
    """Whether groups may be unfinished when their batch is full, and go on in the next one."""

    async def fill(self, batch: PartialBatch, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """Add groups to the batch until it is full, or until the bound on prompts is reached and all have ended.

        Args:
            batch: the batch so far.
            waiting: outstanding groups kept unfinished; they go on before new prompts are admitted.

        Returns:
            The groups that are unfinished now, by id, still outstanding. None of them is generated any more.

        Raises:
            DataError: no prompts. EngineError, RewardError, DeadlineError: the engine or the verifiers failed.
        """
        ...


class Rounds:
    """Rounds of groups until the batch is full or the rounds are used up."""

    def __init__(self, context: RolloutContext) -> None:
        """Start nothing. Groups are unfinished only where answers are set aside."""
        self._context = context
        self.keeps_unfinished = context.section.segment_tokens is not None

    async def fill(self, batch: PartialBatch, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """Add rounds to the batch; see `BatchFiller.fill`."""
        set_aside: list[PartialGroup] = []
        for _ in range(1 + self._context.section.max_refill_rounds):
            # What is set aside will be in a later batch: more prompts in its place would only wait as well.
            missing = self._context.section.prompts_per_step - len(batch.kept) - len(set_aside)
            if missing <= 0:
                break
            batch.rounds += 1
            set_aside += await self._round(batch, waiting, self._round_size(batch, missing))
            waiting = ()
        return tuple(sorted([*waiting, *set_aside], key=lambda group: group.group_id))

    def _round_size(self, batch: PartialBatch, missing: int) -> int:
        """Prompts to request: more where the filter has been keeping fewer. A function of this batch alone."""
        return math.ceil(missing * self._context.section.oversampling / batch.keep_rate())

    async def _round(self, batch: PartialBatch, waiting: Sequence[PartialGroup], count: int) -> list[PartialGroup]:
        """Go on with the groups that wait, and begin `count` new ones. Returns those that are set aside."""
        pending: dict[int, Pending] = {}
        for group in waiting:
            self._context.ledger.resume(group.group_id)
            self._context.collector.groups_resumed += 1
            pending[group.group_id] = group.pending()
        pending |= admit(self._context.source, self._context.ledger, count)
        for attempt in range(self._context.max_attempts):
            requests = self._requests(pending, retry=attempt > 0)
            if not requests:
                break
            await self._generate(requests, pending)
        size = self._context.section.rollouts_per_prompt
        set_aside = {i: entry for i, entry in sorted(pending.items()) if entry.waits(size)}
        incomplete = [i for i, p in pending.items() if i not in set_aside and p.missing(size)]
        for group_id in incomplete:
            self._context.collector.discard(pending[group_id].kept(group_id))
        if incomplete:
            self._context.notices.warn(
                f"{len(incomplete)} groups were still incomplete after {self._context.max_attempts} attempts and are "
                f"dropped (the first: group {incomplete[0]}, rollouts {list(pending[incomplete[0]].missing(size))})"
            )
        for i in sorted(pending.keys() - set_aside.keys()):
            batch.classify(pending[i].group(i), i not in incomplete)
        return [entry.kept(i) for i, entry in set_aside.items()]

    def _requests(self, pending: Mapping[int, Pending], *, retry: bool) -> list[GroupRequest]:
        """Return requests for all rollouts that are missing; a retry is the same group at the next attempt."""
        requests = []
        for group_id, entry in pending.items():
            if entry.wanted(self._context.section.rollouts_per_prompt):
                if retry:
                    self._context.ledger.retry(group_id)
                requests.append(self._context.collector.request(group_id, entry))
        return requests

    async def _generate(self, requests: Sequence[GroupRequest], pending: Mapping[int, Pending]) -> None:
        """One pass of the engine; answers are verified while others are still being generated."""
        iterator = self._context.rollouter.generate(requests)
        try:
            async with asyncio.TaskGroup() as scoring:
                while (rollouts := await self._next(iterator, len(requests))) is not None:
                    accepted = self._context.collector.accept(rollouts, pending)
                    if accepted:
                        scoring.create_task(self._context.collector.score(accepted, pending))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await self._context.collector.close(iterator)

    async def _next(self, iterator: AsyncIterator[tuple[Rollout, ...]], count: int) -> tuple[Rollout, ...] | None:
        what = f"the engine, with {count} groups requested"
        try:
            return await self._context.deadlines.within("generate", anext(iterator), what=what)
        except StopAsyncIteration:
            return None


_PRIOR_GROUPS = 8
"""The share of kept groups begins at that of the batch before, which counts for so many groups. Without it, one
filtered group at the beginning would look like a filter that keeps nothing, and admit four times the prompts."""

_BURST = 64
"""Groups that make their requests in one turn of the event loop, which a thousand would hold for 0.3 s."""


@dataclass(slots=True)
class _Flight:
    """What one batch has under way.

    waiting: groups kept from the batch before, not begun again yet. entries: in flight. ended: tasks in the order in
    which they ended. incomplete: (group, rollouts it lacks) after the last attempt. unfinished: aborted at the end.
    """

    waiting: deque[PartialGroup]
    entries: dict[int, Pending] = field(default_factory=dict)
    tasks: dict[asyncio.Task[None], int] = field(default_factory=dict)
    ended: asyncio.Queue[asyncio.Task[None]] = field(default_factory=asyncio.Queue)
    unfinished: dict[int, Pending] = field(default_factory=dict)
    incomplete: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    admitted: int = 0
    stopping: bool = False


class EarlyFill:
    """Keeps groups in flight until enough of them are trainable."""

    keeps_unfinished = True

    def __init__(self, context: RolloutContext) -> None:
        """Start nothing."""
        self._context = context
        self._keep_rate = 1.0

    async def fill(self, batch: PartialBatch, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """See `BatchFiller.fill`. The first failure ends everything that is in flight."""
        flight = _Flight(deque(waiting))
        try:
            await self._top_up(batch, flight)
            while flight.tasks and len(batch.kept) < self._context.section.prompts_per_step:
                self._collect_finished(batch, flight, await self._next_end(flight))
                await self._top_up(batch, flight)
            if flight.tasks:
                await self._abort_unfinished(batch, flight)
        finally:
            await self._end(flight)
        self._keep_rate = batch.keep_rate(self._keep_rate, _PRIOR_GROUPS)
        batch.rounds += math.ceil(flight.admitted / self._context.section.prompts_requested)
        self._warn_incomplete(flight)
        kept = [*flight.waiting, *(entry.kept(i) for i, entry in flight.unfinished.items())]
        return tuple(sorted(kept, key=lambda group: group.group_id))

    async def _top_up(self, batch: PartialBatch, flight: _Flight) -> None:
        """Begins groups until as many are in flight as the missing ones are likely to need; kept ones come first."""
        section = self._context.section
        missing = section.prompts_per_step - len(batch.kept) - len(flight.unfinished)
        if missing <= 0:
            return
        rate = batch.keep_rate(self._keep_rate, _PRIOR_GROUPS)
        missing_tasks = math.ceil(missing * section.oversampling / rate) - len(flight.tasks)
        segments = section.segment_tokens is not None  # then all go on, beside new ones
        while flight.waiting and (segments or missing_tasks > 0):
            group = flight.waiting.popleft()
            self._context.ledger.resume(group.group_id)
            self._context.collector.groups_resumed += 1
            await self._launch(flight, group.group_id, group.pending())
            missing_tasks -= not segments
        bound = (1 + section.max_refill_rounds) * section.prompts_requested
        count = min(missing_tasks, bound - flight.admitted)
        if count > 0:
            flight.admitted += count
            for group_id, entry in admit(self._context.source, self._context.ledger, count).items():
                await self._launch(flight, group_id, entry)

    async def _launch(self, flight: _Flight, group_id: int, entry: Pending) -> None:
        task = asyncio.create_task(self._complete(flight, group_id, entry), name=f"group {group_id}")
        flight.entries[group_id] = entry
        flight.tasks[task] = group_id
        task.add_done_callback(flight.ended.put_nowait)
        if len(flight.tasks) % _BURST == 0:
            await asyncio.sleep(0)

    async def _complete(self, flight: _Flight, group_id: int, entry: Pending) -> None:
        """One group: all attempts that it needs, one directly after the other."""
        for attempt in range(self._context.max_attempts):
            if flight.stopping or not entry.wanted(self._context.section.rollouts_per_prompt):
                return
            if attempt > 0:
                self._context.ledger.retry(group_id)
            iterator = self._context.rollouter.generate([self._context.collector.request(group_id, entry)])
            try:
                # No deadline of its own: it may wait behind others. `_next_end` waits for the next of them all.
                async for rollouts in iterator:
                    finished = self._context.collector.accept(rollouts, {group_id: entry})
                    if finished:
                        await self._context.collector.score(finished, {group_id: entry})
            finally:
                await self._context.collector.close(iterator)

    async def _next_end(self, flight: _Flight) -> asyncio.Task[None]:
        what = f"the engine, with {len(flight.tasks)} groups in flight"
        return await self._context.deadlines.within("generate", flight.ended.get(), what=what)

    def _collect_finished(self, batch: PartialBatch, flight: _Flight, task: asyncio.Task[None]) -> None:
        """Take a group out of the air. Raises what ended its task."""
        group_id = flight.tasks.pop(task)
        entry = flight.entries.pop(group_id)
        missing = entry.missing(self._context.section.rollouts_per_prompt)
        if task.done() and not task.cancelled():
            task.result()
        if flight.stopping and (missing or entry.unscored):
            self._context.collector.groups_aborted += 1
            flight.unfinished[group_id] = entry
            return
        if entry.waits(self._context.section.rollouts_per_prompt):
            flight.unfinished[group_id] = entry
            return
        if missing:
            flight.incomplete.append((group_id, missing))
            self._context.collector.discard(entry.kept(group_id))
        batch.classify(entry.group(group_id), not missing)

    async def _abort_unfinished(self, batch: PartialBatch, flight: _Flight) -> None:
        """Abort what is in flight, since the batch is full. Groups that were about to end are surplus."""
        flight.stopping = True
        what = f"{len(flight.tasks)} unfinished groups"
        await self._context.deadlines.within("abort", self._context.rollouter.abort(sorted(flight.entries)), what=what)
        _, late = await asyncio.wait(flight.tasks, timeout=self._context.deadlines.abort)
        scoring = {task for task in late if flight.entries[flight.tasks[task]].unscored}
        if scoring:  # All that is left of it is verification, which has its own deadline.
            await asyncio.wait(scoring, timeout=self._context.deadlines.score)
        stuck = [task for task in flight.tasks if not task.done()]
        if stuck:
            self._context.notices.warn(
                f"{len(stuck)} groups did not end within {self._context.deadlines.abort:g} s of their abort (the "
                f"first: group {flight.tasks[stuck[0]]}); they are left behind with what they have. "
                "Look at the engine's log"
            )
            await self._cancel(stuck)
        while not flight.ended.empty():
            self._collect_finished(batch, flight, flight.ended.get_nowait())
        for task in list(flight.tasks):  # Did not even end when it was cancelled.
            self._collect_finished(batch, flight, task)

    async def _end(self, flight: _Flight) -> None:
        """After a failure or a cancellation: nothing of this batch may go on. The cause is what is raised."""
        if not flight.tasks:
            return
        flight.stopping = True
        ids = sorted(flight.entries)
        try:
            await self._context.deadlines.within("abort", self._context.rollouter.abort(ids), what=f"{len(ids)} groups")
        except DaroError as error:
            self._context.notices.warn(f"{len(ids)} groups could not be aborted: {error}")
        finally:
            await self._cancel(list(flight.tasks))

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel and wait, not for ever: closing an iterator may take the whole deadline of an abort."""
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=2 * self._context.deadlines.abort)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # Marks it as seen: another error, or the cancellation, is the one that is raised.

    def _warn_incomplete(self, flight: _Flight) -> None:
        if flight.incomplete:
            group_id, missing = flight.incomplete[0]
            self._context.notices.warn(
                f"{len(flight.incomplete)} groups were still incomplete after {self._context.max_attempts} attempts "
                f"and are dropped (the first: group {group_id}, rollouts {list(missing)})"
            )
