"""Fills one training batch: prompts -> engine -> scorer -> complete groups -> filter -> batch.

Place in the data flow: between the prompt source, the engine and the verifiers on one side and the controller on the
other. What is in a batch depends on the state alone and never on the order of arrival: every round waits for all of its
groups, and batch and surplus are told apart by group id. So a resumed run repeats the same batches.
It refuses rollouts that were not asked for, incomplete groups and, by the filter, groups without signal; it trains and
records nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_daro.config.sections import RolloutSection
from megatron_daro.errors import DataError, DeadlineError, EngineError, RewardError
from megatron_daro.rollout.deadlines import Deadlines, first_cause
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import Engine, Notices, PhaseTimer, PromptSource, Scorer
from megatron_daro.rollout.recorder import group_from_json
from megatron_daro.rollout.sampled_batch import SampledBatch, Snapshot
from megatron_daro.types import Group, GroupRequest, Prompt, Rollout, SamplingParams, Verdict

_LOWEST_KEEP_RATE = 0.25
_EMPTY = "rollout/batches_empty"


@dataclass(slots=True)
class _Pending:
    """A group that is being completed."""

    prompt: Prompt
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def missing(self, rollouts_per_prompt: int) -> tuple[int, ...]:
        return tuple(i for i in range(rollouts_per_prompt) if i not in self.rollouts)

    def group(self, group_id: int) -> Group:
        """The group of what is there, in index order."""
        order = sorted(self.rollouts)
        return Group(
            group_id,
            self.prompt,
            tuple(self.rollouts[i] for i in order),
            tuple(self.verdicts[i] for i in order),
        )


@dataclass(slots=True)
class _Draft:
    """A batch in the making."""

    kept: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0
    fresh_kept: int = 0
    fresh_total: int = 0


class Sampler:
    """The batch source of a run that generates."""

    def __init__(
        self,
        section: RolloutSection,
        *,
        sampling: SamplingParams,
        engine: Engine,
        scorer: Scorer,
        source: PromptSource,
        notices: Notices,
        phases: PhaseTimer,
        filter_groups: bool,
        updates_per_batch: int = 1,
        deadlines: Deadlines | None = None,
        max_attempts: int = 3,
        max_empty_batches: int = 3,
    ) -> None:
        """Starts nothing.

        Args:
            section: the configuration's rollout section.
            sampling: what each request asks for (stop strings already turned into token ids).
            engine: generates. scorer: verifies. source: gives prompts.
            notices: told about short batches and dropped groups.
            phases: verification is measured as "reward".
            filter_groups: keep only groups with a pass rate strictly between 0 and 1 (dynamic sampling).
            updates_per_batch: optimizer steps per batch: one batch of staleness is that many weight versions.
            deadlines: the table of deadlines.
            max_attempts: times that a group's missing rollouts are requested before the group is dropped.
            max_empty_batches: batches in a row that may come out empty.
        """
        self._section = section
        self._sampling = sampling
        self._engine = engine
        self._scorer = scorer
        self._source = source
        self._notices = notices
        self._phases = phases
        self._filter = filter_groups
        self._max_lag = section.max_staleness * updates_per_batch
        self._deadlines = deadlines or Deadlines()
        self._max_attempts = max_attempts
        self._max_empty = max_empty_batches
        self.ledger = Ledger()
        self._carry: tuple[Group, ...] = ()
        self._empty_batches = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `Snapshot.to_json` says: same prompts, same group ids, same carried groups."""
        self._source.load_state_dict(state["source"])
        self.ledger.load_state_dict(state["ledger"])
        self._carry = tuple(group_from_json(record)[0] for record in state["carry"])
        self._empty_batches = int(state["counters"][_EMPTY])

    def stale(self, groups: Sequence[Group], version: int) -> tuple[Group, ...]:
        """Those whose weights are more than `max_staleness` batches behind this weight version."""
        return tuple(group for group in groups if version - group.weight_version > self._max_lag)

    async def sample(self, use_version: int) -> SampledBatch:
        """Samples the next batch; never empty, never more than prompts_per_step groups.

        Args:
            use_version: the policy's weight version when the batch will be trained.

        Raises:
            DataError: no trainable group in `max_empty_batches` batches in a row, or no prompts.
            EngineError, RewardError, DeadlineError: the engine or the verifiers failed.
        """
        started = time.perf_counter()
        draft = _Draft()
        self._take_carry(draft, use_version)
        for _ in range(self._max_empty):
            await self._fill(draft)
            if draft.kept:
                return self._complete(draft, time.perf_counter() - started)
            self._empty_batches += 1
            self._notices.warn(f"no trainable group in this batch ({_why_empty(draft)}); it is skipped")
        raise DataError(
            f"{self._max_empty} batches in a row without a trainable group ({_why_empty(draft)}). "
            "Use prompts the model solves sometimes, raise rollout.rollouts_per_prompt or rollout.prompts_per_step, "
            "or switch the filter off"
        )

    def _take_carry(self, draft: _Draft, use_version: int) -> None:
        """Uses the groups kept from the batch before, but for those that will be too old."""
        old = self.stale(self._carry, use_version)
        self.ledger.finish([group.group_id for group in old], "dropped")
        draft.dropped.extend(old)
        draft.kept.extend(group for group in self._carry if group not in old)
        self._carry = ()

    async def _fill(self, draft: _Draft) -> None:
        """Rounds of prompts until the batch is full or the rounds are used up."""
        target = self._section.prompts_per_step
        for _ in range(1 + self._section.max_refill_rounds):
            missing = target - len(draft.kept)
            if missing <= 0:
                return
            draft.rounds += 1
            for group, complete in await self._round(self._round_size(draft, missing)):
                self._classify(draft, group, complete)
        if 0 < len(draft.kept) < target:
            self._notices.notice(
                f"batch has {len(draft.kept)} of {target} groups after {draft.rounds} rounds of prompts "
                f"({_why_empty(draft)}); going on with these"
            )

    def _round_size(self, draft: _Draft, missing: int) -> int:
        """Prompts to request: more where the filter has been keeping fewer. A function of this batch alone."""
        keep_rate = 1.0
        if draft.fresh_total:
            keep_rate = max(_LOWEST_KEEP_RATE, draft.fresh_kept / draft.fresh_total)
        return math.ceil(missing * self._section.oversampling / keep_rate)

    def _classify(self, draft: _Draft, group: Group, complete: bool) -> None:
        draft.fresh_total += 1
        if not complete:
            self.ledger.finish([group.group_id], "dropped")
            draft.dropped.append(group)
        elif self._filter and not 0 < group.bin < self._section.rollouts_per_prompt:
            self.ledger.finish([group.group_id], "filtered")
            draft.filtered.append(group)
        else:
            draft.kept.append(group)
            draft.fresh_kept += 1

    def _complete(self, draft: _Draft, seconds: float) -> SampledBatch:
        """Splits off the surplus and takes the snapshot."""
        kept = sorted(draft.kept, key=lambda group: group.group_id)
        target = self._section.prompts_per_step
        chosen, surplus = kept[:target], kept[target:]
        if self._section.keep_surplus:
            self._carry = tuple(surplus)
        else:
            self.ledger.finish([group.group_id for group in surplus], "dropped")
            draft.dropped.extend(surplus)
        counters = {_EMPTY: self._empty_batches}
        seen = (*chosen, *draft.filtered, *draft.dropped)
        return SampledBatch(
            groups=tuple(chosen),
            filtered=tuple(draft.filtered),
            dropped=tuple(draft.dropped),
            snapshot=Snapshot(dict(self._source.state_dict()), self.ledger.state_dict(), self._carry, counters),
            rounds=draft.rounds,
            rollout_s=seconds,
            response_tokens=sum(r.response_length for group in seen for r in group.rollouts),
            counters=counters,
        )

    async def _round(self, count: int) -> list[tuple[Group, bool]]:
        """Completes `count` new groups. Returns (group, complete) by group id."""
        prompts = self._source.next(count)
        if len(prompts) != count:
            raise DataError(f"the prompt source gave {len(prompts)} prompts instead of {count}; it must not end")
        pending = {i: _Pending(prompt) for i, prompt in zip(self.ledger.admit(count), prompts, strict=True)}
        for attempt in range(self._max_attempts):
            requests = self._requests(pending, retry=attempt > 0)
            if not requests:
                break
            await self._generate(requests, pending)
        size = self._section.rollouts_per_prompt
        incomplete = [i for i, p in pending.items() if p.missing(size)]
        if incomplete:
            self._notices.warn(
                f"{len(incomplete)} groups were still incomplete after {self._max_attempts} attempts and are "
                f"dropped (the first: group {incomplete[0]}, rollouts {list(pending[incomplete[0]].missing(size))})"
            )
        return [(pending[i].group(i), i not in incomplete) for i in sorted(pending)]

    def _requests(self, pending: Mapping[int, _Pending], *, retry: bool) -> list[GroupRequest]:
        """Requests for all rollouts that are missing; a retry is the same group at the next attempt."""
        requests = []
        for group_id, entry in pending.items():
            missing = entry.missing(self._section.rollouts_per_prompt)
            if missing:
                attempt = self.ledger.retry(group_id) if retry else self.ledger.attempt(group_id)
                requests.append(GroupRequest(group_id, attempt, entry.prompt, missing, self._sampling))
        return requests

    async def _generate(self, requests: Sequence[GroupRequest], pending: Mapping[int, _Pending]) -> None:
        """One pass of the engine; answers are verified while others are still being generated."""
        iterator = self._engine.generate(requests)
        try:
            async with asyncio.TaskGroup() as scoring:
                while (rollouts := await self._next(iterator, len(requests))) is not None:
                    accepted = self._accept(rollouts, pending)
                    if accepted:
                        scoring.create_task(self._score(accepted, pending))
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await self._close(iterator)

    async def _next(self, iterator: AsyncIterator[tuple[Rollout, ...]], count: int) -> tuple[Rollout, ...] | None:
        what = f"the engine, with {count} groups requested"
        try:
            return await self._deadlines.within("generate", anext(iterator), what=what)
        except StopAsyncIteration:
            return None

    async def _close(self, iterator: AsyncIterator[tuple[Rollout, ...]]) -> None:
        """Ends the pass. An iterator that is stuck is reported and left; the engine's own close comes later."""
        aclose = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        try:
            await self._deadlines.within("abort", aclose())
        except (RuntimeError, DeadlineError) as error:
            self._notices.warn(f"generation could not be ended: {error}")

    def _accept(self, rollouts: Sequence[Rollout], pending: Mapping[int, _Pending]) -> list[Rollout]:
        """Those that count: of the current attempt, asked for, finished; each index once."""
        accepted = []
        for rollout in rollouts:
            if not self.ledger.accepts(rollout.group_id, rollout.attempt) or rollout.finish_reason == "abort":
                continue
            entry = pending.get(rollout.group_id)
            if entry is None or rollout.index not in entry.missing(self._section.rollouts_per_prompt):
                self.ledger.refuse()
                continue
            _check_shape(rollout, entry.prompt)
            entry.rollouts[rollout.index] = rollout
            accepted.append(rollout)
        return accepted

    async def _score(self, rollouts: Sequence[Rollout], pending: Mapping[int, _Pending]) -> None:
        pairs = [(rollout.text, pending[rollout.group_id].prompt.answer) for rollout in rollouts]
        with self._phases.measure("reward"):
            verdicts = await self._deadlines.within(
                "score", self._scorer.score_async(pairs), what=f"group {rollouts[0].group_id}"
            )
        if len(verdicts) != len(pairs):
            raise RewardError(f"the verifier gave {len(verdicts)} verdicts for {len(pairs)} answers; allowed: one each")
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            pending[rollout.group_id].verdicts[rollout.index] = verdict


def _check_shape(rollout: Rollout, prompt: Prompt) -> None:
    """An engine that cuts or shifts its answers would train the wrong tokens without a sound."""
    lengths = {"logprobs": len(rollout.logprobs), "loss_mask": len(rollout.loss_mask)}
    wrong = [f"{name} has {n}" for name, n in lengths.items() if n != rollout.response_length]
    if rollout.prompt_length != len(prompt.tokens) or tuple(rollout.tokens[: rollout.prompt_length]) != prompt.tokens:
        wrong.append(f"the first {rollout.prompt_length} tokens are not the prompt")
    if wrong:
        raise EngineError(
            f"group {rollout.group_id} rollout {rollout.index}: {rollout.response_length} response tokens, but "
            f"{' and '.join(wrong)}; allowed: the prompt, then one log-prob and one mask entry per response token"
        )


def _why_empty(draft: _Draft) -> str:
    right = sum(group.bin > 0 for group in draft.filtered)
    wrong = len(draft.filtered) - right
    return f"filtered {right} all right and {wrong} all wrong, {len(draft.dropped)} dropped"
