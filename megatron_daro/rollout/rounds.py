"""Fills a batch in rounds: every round waits for all of its groups, so a run repeats exactly.

Place in the data flow: prompts -> one pass of the engine for the whole round -> intake -> draft. What is in the batch
depends on the state alone and never on the order of arrival. early.py is the other way, for a fleet of servers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence

from megatron_daro.config.sections import RolloutSection
from megatron_daro.rollout.deadlines import Deadlines, first_cause
from megatron_daro.rollout.draft import Draft
from megatron_daro.rollout.intake import Intake
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.pending import Pending, admit
from megatron_daro.rollout.protocol import Engine, Notices, PromptSource
from megatron_daro.types import Group, GroupRequest, Rollout


class Rounds:
    """Rounds of prompts until the batch is full or the rounds are used up."""

    def __init__(
        self,
        section: RolloutSection,
        intake: Intake,
        *,
        engine: Engine,
        source: PromptSource,
        ledger: Ledger,
        notices: Notices,
        deadlines: Deadlines,
        max_attempts: int,
    ) -> None:
        """Starts nothing. Arguments as the sampler's."""
        self._section = section
        self._intake = intake
        self._engine = engine
        self._source = source
        self._ledger = ledger
        self._notices = notices
        self._deadlines = deadlines
        self._max_attempts = max_attempts

    async def fill(self, draft: Draft) -> None:
        """Adds rounds to the draft. Raises what `Sampler.sample` does."""
        for _ in range(1 + self._section.max_refill_rounds):
            missing = self._section.prompts_per_step - len(draft.kept)
            if missing <= 0:
                return
            draft.rounds += 1
            for group, complete in await self._round(self._round_size(draft, missing)):
                draft.classify(group, complete)

    def _round_size(self, draft: Draft, missing: int) -> int:
        """Prompts to request: more where the filter has been keeping fewer. A function of this batch alone."""
        return math.ceil(missing * self._section.oversampling / draft.keep_rate())

    async def _round(self, count: int) -> list[tuple[Group, bool]]:
        """Completes `count` new groups. Returns (group, complete) by group id."""
        pending = admit(self._source, self._ledger, count)
        for attempt in range(self._max_attempts):
            requests = self._requests(pending, retry=attempt > 0)
            if not requests:
                break
            await self._generate(requests, pending)
        size = self._section.rollouts_per_prompt
        incomplete = [i for i, p in pending.items() if p.missing(size)]
        for group_id in incomplete:
            self._intake.give_up(pending[group_id].kept(group_id))
        if incomplete:
            self._notices.warn(
                f"{len(incomplete)} groups were still incomplete after {self._max_attempts} attempts and are "
                f"dropped (the first: group {incomplete[0]}, rollouts {list(pending[incomplete[0]].missing(size))})"
            )
        return [(pending[i].group(i), i not in incomplete) for i in sorted(pending)]

    def _requests(self, pending: Mapping[int, Pending], *, retry: bool) -> list[GroupRequest]:
        """Requests for all rollouts that are missing; a retry is the same group at the next attempt."""
        requests = []
        for group_id, entry in pending.items():
            if entry.missing(self._section.rollouts_per_prompt):
                if retry:
                    self._ledger.retry(group_id)
                requests.append(self._intake.request(group_id, entry))
        return requests

    async def _generate(self, requests: Sequence[GroupRequest], pending: Mapping[int, Pending]) -> None:
        """One pass of the engine; answers are verified while others are still being generated."""
        iterator = self._engine.generate(requests)
        try:
            async with asyncio.TaskGroup() as scoring:
                while (rollouts := await self._next(iterator, len(requests))) is not None:
                    accepted = self._intake.accept(rollouts, pending)
                    if accepted:
                        scoring.create_task(self._intake.score(accepted, pending))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await self._intake.close(iterator)

    async def _next(self, iterator: AsyncIterator[tuple[Rollout, ...]], count: int) -> tuple[Rollout, ...] | None:
        what = f"the engine, with {count} groups requested"
        try:
            return await self._deadlines.within("generate", anext(iterator), what=what)
        except StopAsyncIteration:
            return None
