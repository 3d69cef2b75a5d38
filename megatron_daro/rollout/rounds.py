"""Fills a batch in rounds: every round waits for all of its groups, so a run repeats exactly.

Place in the data flow: prompts -> one pass of the engine for the whole round -> collector -> batch. What is in the
batch depends on the state alone and never on the order of arrival. early.py is the other way, for a fleet of servers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence

from megatron_daro.rollout.batch_filler import RolloutContext
from megatron_daro.rollout.deadlines import first_cause
from megatron_daro.rollout.partial_batch import PartialBatch
from megatron_daro.rollout.pending import PartialGroup, Pending, admit
from megatron_daro.types import Group, GroupRequest, Rollout


class Rounds:
    """Rounds of prompts until the batch is full or the rounds are used up."""

    keeps_unfinished = False

    def __init__(self, context: RolloutContext) -> None:
        """Start nothing."""
        self._context = context

    async def fill(self, batch: PartialBatch, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """Add rounds to the batch; see `BatchFiller.fill`. `waiting` is empty: nothing is left unfinished here."""
        assert not waiting, "rounds have no unfinished groups"
        for _ in range(1 + self._context.section.max_refill_rounds):
            missing = self._context.section.prompts_per_step - len(batch.kept)
            if missing <= 0:
                break
            batch.rounds += 1
            for group, complete in await self._round(self._round_size(batch, missing)):
                batch.classify(group, complete)
        return ()

    def _round_size(self, batch: PartialBatch, missing: int) -> int:
        """Prompts to request: more where the filter has been keeping fewer. A function of this batch alone."""
        return math.ceil(missing * self._context.section.oversampling / batch.keep_rate())

    async def _round(self, count: int) -> list[tuple[Group, bool]]:
        """Completes `count` new groups. Returns (group, complete) by group id."""
        pending = admit(self._context.source, self._context.ledger, count)
        for attempt in range(self._context.max_attempts):
            requests = self._requests(pending, retry=attempt > 0)
            if not requests:
                break
            await self._generate(requests, pending)
        size = self._context.section.rollouts_per_prompt
        incomplete = [i for i, p in pending.items() if p.missing(size)]
        for group_id in incomplete:
            self._context.collector.discard(pending[group_id].kept(group_id))
        if incomplete:
            self._context.notices.warn(
                f"{len(incomplete)} groups were still incomplete after {self._context.max_attempts} attempts and are "
                f"dropped (the first: group {incomplete[0]}, rollouts {list(pending[incomplete[0]].missing(size))})"
            )
        return [(pending[i].group(i), i not in incomplete) for i in sorted(pending)]

    def _requests(self, pending: Mapping[int, Pending], *, retry: bool) -> list[GroupRequest]:
        """Return requests for all rollouts that are missing; a retry is the same group at the next attempt."""
        requests = []
        for group_id, entry in pending.items():
            if entry.missing(self._context.section.rollouts_per_prompt):
                if retry:
                    self._context.ledger.retry(group_id)
                requests.append(self._context.collector.request(group_id, entry))
        return requests

    async def _generate(self, requests: Sequence[GroupRequest], pending: Mapping[int, Pending]) -> None:
        """One pass of the engine; answers are verified while others are still being generated."""
        iterator = self._context.engine.generate(requests)
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
