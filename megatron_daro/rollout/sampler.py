"""From batch to batch: groups left over by the last one + groups from `BatchFiller` -> SampledBatch + what is left now.

Drops groups that are too old, cuts the batch at its size (lowest ids first), and takes the snapshot that a checkpoint
continues from. Where several batches in a row have no group that can be trained, it ends the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_daro.config.sections import FinishBatch
from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.rollout.batch_filler import BatchFiller, RolloutParts
from megatron_daro.rollout.batch_so_far import BatchSoFar
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.groups_under_way import UnfinishedGroup, without_lost_experts
from megatron_daro.rollout.ledger import Outcome
from megatron_daro.rollout.no_signal import describe
from megatron_daro.rollout.protocol import Scorer
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.rollout.sampled_batch import SampledBatch, Snapshot, reading_state
from megatron_daro.types import Group

_UNFINISHED = "rollout/groups_unfinished"
_FAILED_STARTS = "reward/failed_worker_starts"
_MORE_EMPTY_BATCHES = 2  # empty batches in a row, beyond those that the longest answer may take


class Sampler:
    """The batch source of a run that generates."""

    def __init__(
        self,
        parts: RolloutParts,
        scorer: Scorer,
        *,
        finish_batch: FinishBatch,
        kept_bins: Collection[int],
        steps_per_batch: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        """Start nothing.

        Args:
            parts: what sampling works with. scorer: the verifiers, whose failed starts are counted.
            finish_batch: the way to fill a batch (filling.py).
            kept_bins: the bins 0..K whose groups are trained; others are replaced (dynamic sampling).
            steps_per_batch: optimizer steps of a batch: one batch of staleness is that many weight versions.
            recorder: writes batches without a trainable group; None: they are not written.
        """
        self._section = parts.section
        self._prompts = parts.prompts
        self._notices = parts.notices
        self._collector = parts.collector
        self._rollouter = parts.rollouter
        self._scorer = scorer
        self._filler = BatchFiller(parts, finish_batch)
        self._kept_bins = kept_bins
        self._max_lag = parts.section.max_staleness * steps_per_batch
        # A group that begins in the first empty batch may take until the last of its segments to end.
        self._max_empty = parts.section.segments + _MORE_EMPTY_BATCHES
        self.ledger = parts.ledger
        self._surplus: tuple[Group, ...] = ()
        self._unfinished: tuple[UnfinishedGroup, ...] = ()
        self._short_batches = 0
        self._recorder = recorder
        self._deadlines = parts.deadlines

    def load_state_dict(self, state: Mapping[str, Any], waiting: Sequence[RecordedGroup] = ()) -> None:
        """Continue from `Snapshot.to_json`, with the same prompts, group ids and waiting groups.

        Raises:
            CheckpointError: the state is torn or does not add up, or a waiting group has an answer longer than answers
                may be now, or a partial one that has no room to go on.
        """
        with reading_state():
            self._load(state, waiting)
        lengths = [rollout.response_length for record in waiting for rollout in record.group.rollouts]
        lengths += [rollout.response_length + 1 for record in waiting for rollout in record.partial]
        longest, limit = max(lengths, default=0), self._section.max_response_tokens
        if longest > limit:
            raise CheckpointError(
                f"rollout.max_response_tokens: got {limit}, but a group that waits in the checkpoint has an answer of "
                f"{longest} tokens or more; allowed: {longest} or more; fix: set it back, or start a new run from the "
                "weights"
            )

    def _load(self, state: Mapping[str, Any], waiting: Sequence[RecordedGroup]) -> None:
        self._prompts.load_state_dict(state["source"])
        self.ledger.load_state_dict(state["ledger"])
        size, saved = self._section.rollouts_per_prompt, waiting
        waiting = [without_lost_experts(record) for record in saved]
        complete = [record for record in waiting if len(record.group.rollouts) == size and not record.partial]
        self._surplus = tuple(record.group for record in complete)
        self._unfinished = tuple(UnfinishedGroup.from_record(r, size) for r in waiting if r not in complete)
        there = sorted(record.group.group_id for record in waiting)
        if list(self.ledger.outstanding) != there:
            raise ValueError(f"groups {list(self.ledger.outstanding)} are outstanding, but groups {there} are there")
        counters = state["counters"]
        self._collector.counters.load(counters)
        self._rollouter.load_counters(counters)
        if lost := sum(map(_generated_tokens, saved)) - sum(map(_generated_tokens, waiting)):
            self._collector.counters.aborted_tokens += lost
            self._notices.warn(
                f"answers of {lost} tokens that wait in the checkpoint are asked for again: steps after it removed the "
                "files of their experts"
            )

    def _is_stale(self, oldest: int, version: int) -> bool:
        """Whether weights of version `oldest` are more than `max_staleness` batches behind this weight version."""
        return version - oldest > self._max_lag

    async def sample(self, use_version: int) -> SampledBatch:
        """Sample the next batch, of 1 to prompts_per_batch trainable groups. An attempt that finds none is recorded,
        counted in `rollout/batches_empty`, and followed by another.

        Args:
            use_version: the policy's weight version when training of the batch will begin.

        Raises:
            DataError: too many attempts in a row found no trainable group, or there are no prompts.
            EngineError, WorkerError, RewardError, RolloutError, DeadlineError: engine, verifiers or environment failed.
        """
        started, tokens_before = time.perf_counter(), self._collector.fresh_tokens
        batch = BatchSoFar(
            self.ledger, rollouts_per_prompt=self._section.rollouts_per_prompt, kept_bins=self._kept_bins
        )
        surplus_ids = {group.group_id for group in self._surplus}
        self._take_surplus(batch, use_version)
        self._drop_too_old(batch, use_version)
        where, empty = "", 0
        while empty < self._max_empty:
            await self._fill(batch)
            if batch.kept:
                tokens = self._collector.fresh_tokens - tokens_before
                ended = [group for group in (*batch.kept, *batch.filtered) if group.group_id not in surplus_ids]
                self._prompts.observe(sorted(ended, key=lambda group: group.group_id))
                return self._complete(batch, time.perf_counter() - started, tokens)
            empty += 1
            self._collector.counters.batches_empty += 1
            where = await self._record_untrainable(batch, use_version + 1)
            again = ", so another is sampled" if empty < self._max_empty else ""
            batches = "a batch" if empty == 1 else f"{empty} batches in a row"
            self._notices.warn(f"no trainable group in {batches} ({self._why_short(batch)}){again}; {where}")
        if batch.incomplete > len(batch.filtered):
            remedy = "Most of these groups failed at every attempt: correct what the warnings before this name"
        else:
            remedy = (
                f"{describe(batch.filtered)} Use prompts the model solves sometimes, raise "
                "rollout.rollouts_per_prompt or rollout.prompts_per_batch, or switch the filter off"
            )
        why = self._why_short(batch)
        raise DataError(f"{self._max_empty} batches in a row without a trainable group ({why}). {remedy}; {where}")

    def _why_short(self, batch: BatchSoFar) -> str:
        unfinished = f", {len(self._unfinished)} not finished yet" if self._unfinished else ""
        return batch.why_short() + unfinished

    async def _record_untrainable(self, batch: BatchSoFar, step: int) -> str:
        """Write the groups sampled so far for a step, none of which trains. Returns where they are, for a message."""
        if self._recorder is None:
            return "observe.save_rollouts is off, so the answers were not recorded"
        groups: dict[Outcome, list[Group]] = {"filtered": batch.filtered, "dropped": batch.dropped}
        writing = asyncio.to_thread(self._recorder.write_untrainable, step, groups)
        path = await self._deadlines.within("write", writing, what=f"the untrainable batch of step {step}")
        return f"its answers are in {path}, which `megatron-daro report` shows"

    def _take_surplus(self, batch: BatchSoFar, use_version: int) -> None:
        """Begin with the surplus of the last batch; drop groups that will be too old."""
        for group in self._surplus:
            if self._is_stale(group.weight_version, use_version):
                batch.drop([group])
            else:
                batch.kept.append(group)
        self._surplus = ()

    def _drop_too_old(self, batch: BatchSoFar, use_version: int) -> None:
        """Drop unfinished groups whose oldest token will be too old."""

        def is_usable(group: UnfinishedGroup) -> bool:
            return group.weight_version is None or not self._is_stale(group.weight_version, use_version)

        self._discard(batch, [group for group in self._unfinished if not is_usable(group)])
        self._unfinished = tuple(filter(is_usable, self._unfinished))

    def _discard(self, batch: BatchSoFar, groups: Sequence[UnfinishedGroup]) -> None:
        for group in groups:
            self._collector.count_discarded(group)
        batch.drop(group.finished for group in groups)

    async def _fill(self, batch: BatchSoFar) -> None:
        """Fill the batch up. The 1st, 2nd, 4th, 8th... short batch of this process is announced."""
        ended_before = batch.ended
        self._unfinished = await self._filler.fill(batch, self._unfinished)
        while self._unfinished and not batch.kept and batch.ended == ended_before:  # all were set aside
            self._unfinished = await self._filler.fill(batch, self._unfinished)
        target = self._section.prompts_per_batch
        if 0 < len(batch.kept) < target:
            self._short_batches += 1
            if self._short_batches.bit_count() == 1:
                self._notices.notice(
                    f"batch has {len(batch.kept)} of {target} groups of {batch.rounds} rounds of prompts "
                    f"({self._why_short(batch)}); going on with these"
                    + (f"; {self._short_batches} batches were short so far" if self._short_batches > 1 else "")
                )

    def _complete(self, batch: BatchSoFar, seconds: float, generated_tokens: int) -> SampledBatch:
        """Split off the surplus and take the snapshot."""
        kept = sorted(batch.kept, key=lambda group: group.group_id)
        target = self._section.prompts_per_batch
        chosen, surplus = kept[:target], kept[target:]
        if self._section.keeps_waiting:
            self._surplus = tuple(surplus)
        else:
            batch.drop(surplus)
            self._discard(batch, self._unfinished)
            self._unfinished = ()
        counters = self._counters()
        return SampledBatch(
            groups=tuple(chosen),
            filtered=tuple(batch.filtered),
            dropped=tuple(batch.dropped),
            snapshot=Snapshot(
                dict(self._prompts.state_dict()), self.ledger.state_dict(), self._surplus, counters, self._unfinished
            ),
            rounds=batch.rounds,
            rollout_s=seconds,
            generated_tokens=generated_tokens,
            counters=counters | {_FAILED_STARTS: self._scorer.failed_starts},
        )

    def _counters(self) -> dict[str, int]:
        return {
            **self._collector.counters.metrics(),
            _UNFINISHED: len(self._unfinished),
            **self._rollouter.counters(),
        }


def _generated_tokens(record: RecordedGroup) -> int:
    return sum(rollout.generated_length for rollout in (*record.group.rollouts, *record.partial))
