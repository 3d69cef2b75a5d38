"""Batches that end when enough groups are trainable: order of completion, aborts, failures, books."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from fleet_fakes import (
    KEEP,
    SLOW,
    count_ids,
    fatal,
    ids,
    run,
    sample,
    saved,
    setup,
    tokens_of,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_fakes import FAST, NEVER, FakeScorer, K

from megatron_daro.config.sections import FinishBatch
from megatron_daro.errors import DeadlineError, EngineError
from megatron_daro.rollout.filling import FILLINGS


def test_each_name_of_finish_batch_has_its_way_to_fill():
    assert FILLINGS.keys() == set(get_args(FinishBatch))


def test_a_full_batch_does_not_wait_for_slow_groups():
    parts = setup()
    parts.engine.pace = lambda group_id: SLOW if group_id in (0, 2) else 1
    batch = sample(parts)
    assert ids(batch.groups) == [1, 3]
    assert parts.engine.aborts == [[0, 2]]
    assert sorted(ids(batch.dropped)) == [0, 2]
    # Every group was a call of its own.
    assert sorted((r.group_id, r.indices) for r in parts.engine.asked) == [(i, (0, 1, 2, 3)) for i in range(4)]
    counts = {"admitted": 4, "trained": 0, "filtered": 0, "dropped": 2, "outstanding": 2}
    assert parts.sampler.ledger.counts() == counts
    assert batch.snapshot.unfinished == () and batch.counters["rollout/groups_aborted"] == 2


def test_groups_count_in_the_order_in_which_they_end():
    parts = setup(rollout={"oversampling": 3.0})
    parts.engine.pace = lambda group_id: 3 * (6 - group_id)
    assert ids(sample(parts).groups) == [4, 5]


def test_filtered_groups_are_replaced_while_others_are_still_generated():
    parts = setup(filter_groups=True, rollout={"prompts_per_batch": 3, "oversampling": 1.0})
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="easy" if int(p.id[1:]) < 2 else "mixed") for p in give(n)
    ]
    seen = {}
    parts.engine.pace = lambda group_id: (
        seen.setdefault(group_id, sorted(parts.engine.running)) and (SLOW if group_id == 2 else 1)
    )
    batch = sample(parts)
    assert 2 in seen[3], "group 3, which replaces a filtered one, began while the slow group 2 was generated"
    assert ids(batch.filtered)[:2] == [0, 1]
    assert len(batch.groups) == 3


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_prompts_are_bounded_and_a_short_batch_is_said(rounds):
    rollout = {"prompts_per_batch": 10, "oversampling": 1.2, "max_refill_rounds": rounds}
    parts = setup(filter_groups=True, rollout=rollout)
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="mixed" if int(p.id[1:]) == 5 else "hard") for p in give(n)
    ]
    batch = sample(parts)
    assert parts.sampler.ledger.counts()["admitted"] == (1 + rounds) * 12 == len(parts.source.given)
    assert ids(batch.groups) == [5] and batch.rounds == 1 + rounds
    assert parts.engine.most_running <= 4 * 12
    assert any("1 of 10" in message for message in parts.progress.messages)


def test_a_batch_begins_with_as_many_groups_as_the_last_one_came_to_need():
    parts = setup(filter_groups=True, rollout={"prompts_per_batch": 8, "oversampling": 1.0, "max_refill_rounds": 9})
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="mixed" if int(p.id[1:]) % 3 == 0 else "hard") for p in give(n)
    ]
    begun = []
    for version in range(4):
        parts.engine.pace, parts.engine.asked = (lambda group_id: 5), []
        batch = sample(parts, version)
        begun.append(parts.engine.most_running)
        parts.engine.most_running = 0
        assert len(batch.groups) == 8
        train(parts, batch)
    assert begun[0] < 16 < begun[-1] <= 4 * 8


def test_a_failed_group_is_asked_again_at_once_beside_the_others():
    parts = setup(rollout={"oversampling": 1.0})
    parts.engine.lost = {(0, 0, 1), (0, 0, 2), (0, 1, 2)}
    parts.engine.pace = lambda group_id: 1 if group_id == 0 else 10
    batch = sample(parts)
    asked = [(r.group_id, r.attempt, r.indices) for r in parts.engine.asked]
    assert asked == [(0, 0, (0, 1, 2, 3)), (1, 0, (0, 1, 2, 3)), (0, 1, (1, 2)), (0, 2, (2,))]
    assert [r.attempt for r in batch.groups[0].rollouts] == [0, 1, 2, 0]
    assert parts.sampler.ledger.retries == 2 and not parts.engine.aborts


def test_a_group_that_fails_every_time_is_dropped_and_replaced():
    parts = setup(rollout={"oversampling": 1.0})
    parts.engine.lost = {(0, attempt, 3) for attempt in range(9)}
    batch = sample(parts)
    assert ids(batch.groups) == [1, 2] and ids(batch.dropped)[0] == 0
    assert len([r for r in parts.engine.asked if r.group_id == 0]) == 3


def test_what_an_engine_aborts_by_itself_goes_on_at_once_from_where_it_was():
    parts = setup(rollout={"oversampling": 1.0})

    def pace(group_id):
        if group_id == 0 and len(parts.engine.asked) == 2 and not parts.engine.aborts:
            parts.engine.aborts.append("once")
            parts.engine.aborted.add(0)
        return 3

    parts.engine.pace = pace
    batch = sample(parts)
    assert [(r.group_id, r.attempt) for r in parts.engine.asked] == [(0, 0), (1, 0), (0, 1)]
    assert len(batch.groups[0].rollouts) == K and batch.generated_tokens == parts.engine.generated


def test_a_fatal_error_of_one_group_ends_the_batch_and_everything_in_flight():
    parts = setup()
    parts.engine.pace = lambda group_id: 1 if group_id == 2 else SLOW
    parts.engine.raises = {2: fatal()}
    with pytest.raises(EngineError, match="no server is left"):
        sample(parts)
    assert parts.engine.aborts == [[0, 1, 3]] and not parts.engine.running and parts.engine.iterators_closed == 4
    assert parts.sampler.ledger.counts()["outstanding"] == 4


def test_the_first_error_is_the_one_that_is_raised():
    parts = setup()
    parts.engine.pace = lambda group_id: 1 + group_id
    parts.engine.raises = {0: fatal("the cause"), 1: fatal("a consequence"), 3: fatal("another")}
    parts.engine.abort = lambda ids: (_ for _ in ()).throw(EngineError("cannot abort either"))
    with pytest.raises(EngineError, match="the cause"):
        sample(parts)
    assert any("cannot abort either" in m for m in parts.progress.messages)


def test_cancelling_ends_all_groups_and_aborts_at_the_engine():
    parts = setup()
    parts.engine.hangs = set(range(4))

    async def go():
        task = asyncio.create_task(parts.sampler.sample(0))
        while len(parts.engine.running) < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(go())
    assert not parts.engine.running and parts.engine.aborts == [[0, 1, 2, 3]]
    assert parts.sampler.ledger.counts()["outstanding"] == 4


def test_a_fleet_in_which_nothing_ends_is_named():
    parts = setup(deadlines=replace(FAST, next_group=0.05))
    parts.engine.hangs = set(range(99))
    with pytest.raises(DeadlineError, match="next_group"):
        sample(parts)
    assert not parts.engine.running


def test_a_teacher_that_hangs_is_named():
    parts = setup(deadlines=replace(FAST, teacher=0.05), teacher=SlowTeacher(99))
    with pytest.raises(DeadlineError, match=r"'teacher' \(algorithm.distill.urls\)"):
        sample(parts)


def test_the_deadline_is_for_the_next_group_and_not_for_each():
    """Four groups of 0.1 s one after the other, with a deadline of 0.3 s: no wait is that long."""
    parts = setup(rollout={"prompts_per_batch": 4, "oversampling": 1.0}, deadlines=replace(FAST, next_group=0.3))
    slots, generate = asyncio.Semaphore(1), parts.engine.generate

    async def one_at_a_time(requests):
        async with slots:
            await asyncio.sleep(0.1)
            async for rollouts in generate(requests):
                yield rollouts

    parts.engine.generate = one_at_a_time
    assert len(sample(parts).groups) == 4


def test_a_group_that_does_not_hear_the_abort_is_left_behind():
    parts = setup(rollout=KEEP, deadlines=replace(FAST, abort=0.05))
    parts.engine.deaf = {1}
    batch = sample(parts)
    assert any("group 1" in m for m in parts.progress.messages)
    assert ids(batch.snapshot.unfinished) == [1] and len(batch.groups) == 2
    assert saved(batch)[0]["ledger"]["outstanding"]


class SlowTeacher:
    """Takes so many seconds for each answer of group 0, none for the others."""

    def __init__(self, seconds):
        self.seconds = seconds

    async def read(self, rollouts):
        if rollouts[0].group_id == 0:
            await asyncio.sleep(self.seconds)
        return [replace(r, teacher_logprobs=np.zeros(r.response_length, np.float32)) for r in rollouts]


@pytest.mark.parametrize(("seconds", "comes"), [(0.3, True), (NEVER, False)])
def test_a_batch_waits_for_a_slow_teacher_as_for_a_verifier_and_counts_what_it_loses(seconds, comes):
    deadlines = replace(FAST, abort=0.05, score=20.0 if comes else 0.05)
    parts = setup(rollout=KEEP | {"oversampling": 1.5}, deadlines=deadlines, teacher=SlowTeacher(seconds))
    batch = sample(parts)
    whole = sorted(ids((*batch.groups, *batch.snapshot.surplus)))
    assert whole == ([0, 1, 2] if comes else [1, 2])
    assert batch.counters["rollout/aborted_tokens"] == (0 if comes else 2 + 4 + 6 + 8)
    assert any("teacher" in message for message in parts.progress.messages) is not comes


FATES = st.sampled_from(["fast", "slow", "flaky", "dead"])


@given(
    fates=st.lists(FATES, min_size=30, max_size=30),
    paces=st.lists(st.integers(1, 6), min_size=30, max_size=30),
    filter_groups=st.booleans(),
    resumes=st.booleans(),
    keep=st.booleans(),
    oversampling=st.sampled_from([1.0, 1.6, 3.0]),
    restart=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_books_add_up_whatever_the_engine_does(fates, paces, filter_groups, resumes, keep, oversampling, restart):
    """Every group is in exactly one place, and every generated token is in it or was counted as thrown away."""
    rollout = {"prompts_per_batch": 3, "oversampling": oversampling, "max_refill_rounds": 9} | (KEEP if keep else {})
    ended: list = []
    parts, generated, lost, received = setup(filter_groups, rollout), 0, 0, 0
    for version in range(4):
        arrange(parts.engine, fates, paces)
        parts.engine.version, parts.engine.resumes = version, resumes
        batch = sample(parts, version)
        received += batch.generated_tokens
        waiting = [*batch.snapshot.surplus, *(p.finished for p in batch.snapshot.unfinished)]
        ended += [*batch.filtered, *batch.dropped]
        everywhere = count_ids(ended, batch.groups, waiting)
        counts = parts.sampler.ledger.counts()
        assert everywhere == dict.fromkeys(range(counts["admitted"]), 1)
        assert counts["outstanding"] == len(batch.groups) + len(waiting)
        unused = sum(p.generated_tokens for p in batch.snapshot.unfinished) + tokens_of(batch.snapshot.surplus)
        used = tokens_of(group for group in (*ended, *batch.groups) if len(group.rollouts) == K)
        wasted = batch.counters["rollout/aborted_tokens"]
        assert received == parts.engine.generated - parts.engine.lost_tokens + generated - lost
        assert received == used + unused + wasted
        assert keep or not waiting
        state = saved(batch)
        train(parts, batch)
        ended += batch.groups
        if restart and version == 1:
            generated, lost = parts.engine.generated, parts.engine.lost_tokens
            parts = setup(filter_groups, rollout)
            parts.sampler.load_state_dict(*state)


def arrange(engine, fates, paces):
    """Groups of a fate each: `slow` ends by an abort mostly, `flaky` loses two rollouts at first, `dead` always one."""

    def fate(group_id):
        return fates[group_id % len(fates)]

    engine.pace = lambda group_id: paces[group_id % len(paces)] * (20 if fate(group_id) == "slow" else 1)
    engine.lost = {(i, 0, j) for i in range(400) if fate(i) == "flaky" for j in (0, 2)}
    engine.lost |= {(i, attempt, 1) for i in range(400) if fate(i) == "dead" for attempt in range(30)}


def test_a_group_whose_verification_is_cut_off_goes_on_later_and_is_not_trained_without_its_verdicts():
    """Its answers come after the abort, while the verdicts of another group are waited for; its own are not."""

    class Scorer(FakeScorer):
        async def score_async(self, pairs):
            if pairs[0][1] == "slow":
                while not parts.engine.aborts:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.15)  # longer than the abort is waited for
                generated.set()
                await verifying.wait()
            if pairs[0][1] == "late":
                verifying.set()
                await asyncio.Event().wait()
            return await super().score_async(pairs)

    parts, generated, verifying = (
        setup(rollout=KEEP, deadlines=replace(FAST, abort=0.05), scorer=Scorer()),
        asyncio.Event(),
        asyncio.Event(),
    )
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer={"p0": "slow", "p1": "late"}.get(p.id, "mixed")) for p in give(n)
    ]
    generate = parts.engine.generate

    async def late(requests):
        if requests[0].group_id == 1:
            await generated.wait()
            parts.engine.aborted.clear()
        async for rollouts in generate(requests):
            yield rollouts

    parts.engine.generate = late
    batch = sample(parts)
    assert 1 not in ids(batch.groups) and all(len(group.verdicts) == K for group in batch.groups)
    assert [len(p.finished.verdicts) for p in batch.snapshot.unfinished if p.group_id == 1] == [0]
