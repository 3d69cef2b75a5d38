"""Fills a batch in rounds: every round waits for all of its groups, so a run repeats exactly.

Place in the data flow: prompts -> one pass of the engine for the whole round -> intake -> draft. What is in the batch
depends on the state alone and never on the order of arrival. early.py is the other way, for a fleet of servers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence

from megatron_daro.rollout.deadlines import first_cause
from megatron_daro.rollout.draft import Draft
from megatron_daro.rollout.filling import Filling
from megatron_daro.rollout.pending import PartialGroup, Pending, admit
from megatron_daro.types import Group, GroupRequest, Rollout


class Rounds:
    """Rounds of prompts until the batch is full or the rounds are used up."""

    keeps_unfinished = False

    def __init__(self, filling: Filling) -> None:
        """Start nothing."""
        self._filling = filling

    async def fill(self, draft: Draft, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """Add rounds to the draft; see `BatchFiller.fill`. `waiting` is empty: nothing is left unfinished here."""
        assert not waiting, "rounds have no unfinished groups"
        for _ in range(1 + self._filling.section.max_refill_rounds):
            missing = self._filling.section.prompts_per_step - len(draft.kept)
            if missing <= 0:
                break
            draft.rounds += 1
            for group, complete in await self._round(self._round_size(draft, missing)):
                draft.classify(group, complete)
        return ()

    def _round_size(self, draft: Draft, missing: int) -> int:
        """Prompts to request: more where the filter has been keeping fewer. A function of this batch alone."""
        return math.ceil(missing * self._filling.section.oversampling / draft.keep_rate())

    async def _round(self, count: int) -> list[tuple[Group, bool]]:
        """Completes `count` new groups. Returns (group, complete) by group id."""
        pending = admit(self._filling.source, self._filling.ledger, count)
        for attempt in range(self._filling.max_attempts):
            requests = self._requests(pending, retry=attempt > 0)
            if not requests:
                break
            await self._generate(requests, pending)
        size = self._filling.section.rollouts_per_prompt
        incomplete = [i for i, p in pending.items() if p.missing(size)]
        for group_id in incomplete:
            self._filling.intake.give_up(pending[group_id].kept(group_id))
        if incomplete:
            self._filling.notices.warn(
                f"{len(incomplete)} groups were still incomplete after {self._filling.max_attempts} attempts and are "
                f"dropped (the first: group {incomplete[0]}, rollouts {list(pending[incomplete[0]].missing(size))})"
            )
        return [(pending[i].group(i), i not in incomplete) for i in sorted(pending)]

    def _requests(self, pending: Mapping[int, Pending], *, retry: bool) -> list[GroupRequest]:
        """Return requests for all rollouts that are missing; a retry is the same group at the next attempt."""
        requests = []
        for group_id, entry in pending.items():
            if entry.missing(self._filling.section.rollouts_per_prompt):
                if retry:
                    self._filling.ledger.retry(group_id)
                requests.append(self._filling.intake.request(group_id, entry))
        return requests

    async def _generate(self, requests: Sequence[GroupRequest], pending: Mapping[int, Pending]) -> None:
        """One pass of the engine; answers are verified while others are still being generated."""
        iterator = self._filling.engine.generate(requests)
        try:
            async with asyncio.TaskGroup() as scoring:
                while (rollouts := await self._next(iterator, len(requests))) is not None:
                    accepted = self._filling.intake.accept(rollouts, pending)
                    if accepted:
                        scoring.create_task(self._filling.intake.score(accepted, pending))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await self._filling.intake.close(iterator)

    async def _next(self, iterator: AsyncIterator[tuple[Rollout, ...]], count: int) -> tuple[Rollout, ...] | None:
        what = f"the engine, with {count} groups requested"
        try:
            return await self._filling.deadlines.within("generate", anext(iterator), what=what)
        except StopAsyncIteration:
            return None
