"""Batches that end when enough groups are trainable: order of completion, aborts, partial groups, failures, books."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fleet_fakes import LONGEST, FleetEngine, count_ids, fatal, ids, length_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_fakes import FAST, FakePhases, FakeProgress, FakeScorer, FakeSource, K, make_rollout, make_sampler

from megatron_daro.errors import CheckpointError, DataError, DeadlineError, EngineError
from megatron_daro.rollout import deadlines as deadlines_module
from megatron_daro.rollout.recorder import group_to_json
from megatron_daro.types import SamplingParams

KEEP = {"keep_surplus": True, "max_staleness": 1}
SLOW = 1000


def setup(filter_groups=False, rollout=None, **options):
    engine, source, progress = FleetEngine(), FakeSource(), FakeProgress()
    options = {"finish_early": True} | options
    rollout = {"prompts_per_step": 2, "oversampling": 2.0} | (rollout or {})
    sampler = make_sampler(
        engine, source, progress, FakePhases(), filter_groups=filter_groups, rollout=rollout, **options
    )
    return SimpleNamespace(engine=engine, source=source, progress=progress, sampler=sampler)


def run(coroutine):
    """Runs it and sees that no task is left behind."""

    async def go():
        try:
            return await coroutine
        finally:
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, left

    return asyncio.run(go())


def sample(parts, use_version=0):
    return run(parts.sampler.sample(use_version))


def train(parts, batch, outcome="trained"):
    parts.sampler.ledger.finish(ids(batch.groups), outcome)


def saved(batch):
    """The state of a checkpoint written after this batch, as it comes back from disk."""
    return json.loads(json.dumps(batch.snapshot.to_json(dict.fromkeys(ids(batch.groups), "trained"))))


def plain(groups):
    return [group_to_json(group, "trained") for group in groups]


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
    assert batch.snapshot.partial == () and batch.counters["rollout/groups_aborted"] == 2


def test_groups_count_in_the_order_in_which_they_end():
    parts = setup(rollout={"oversampling": 3.0})
    parts.engine.pace = lambda group_id: 3 * (6 - group_id)
    assert ids(sample(parts).groups) == [4, 5]


def test_filtered_groups_are_replaced_while_others_are_still_generated():
    parts = setup(filter_groups=True, rollout={"prompts_per_step": 3, "oversampling": 1.0})
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
    rollout = {"prompts_per_step": 10, "oversampling": 1.2, "max_refill_rounds": rounds}
    parts = setup(filter_groups=True, rollout=rollout)
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="mixed" if int(p.id[1:]) == 5 else "hard") for p in give(n)
    ]
    batch = sample(parts)
    assert parts.sampler.ledger.counts()["admitted"] == (1 + rounds) * 12 == len(parts.source.given)
    assert ids(batch.groups) == [5] and batch.rounds == 1 + rounds
    assert parts.engine.most_running <= 4 * 12
    assert any("batch has 1 of 10 groups" in message for message in parts.progress.messages)


def test_one_filtered_group_does_not_quadruple_what_is_in_flight():
    parts = setup(filter_groups=True, rollout={"prompts_per_step": 10, "oversampling": 1.0})
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="easy" if p.id == "p0" else "mixed") for p in give(n)
    ]
    parts.engine.pace = lambda group_id: 1 if group_id == 0 else 5
    sample(parts)
    assert 10 <= parts.engine.most_running <= 12


def test_a_batch_without_signal_is_an_error_in_the_end():
    parts = setup(filter_groups=True, rollout={"max_refill_rounds": 1})
    parts.source.next = lambda n, give=parts.source.next: [replace(p, answer="easy") for p in give(n)]
    with pytest.raises(DataError, match="3 batches in a row without a trainable group"):
        sample(parts)
    assert parts.sampler.ledger.counts()["admitted"] == 3 * 2 * 4


def kept_in_part(parts):
    """A batch that leaves group 0 in part; returns (batch, the partial group, tokens of its unfinished rollouts)."""
    parts.engine.pace = lambda group_id: 4 if group_id == 0 else 1
    batch = sample(parts)
    assert ids(batch.groups) == [1, 2]
    (partial,) = batch.snapshot.partial
    assert partial.group_id == 0
    finished, unfinished = partial.finished.rollouts, partial.unfinished
    turns = unfinished[0].response_length
    assert 2 <= turns < LONGEST
    assert {r.index for r in finished} == {i for i in range(K) if length_of(0, i) <= turns} and finished
    assert {r.index: r.response_length for r in unfinished} == {i: turns for i in range(K) if length_of(0, i) > turns}
    assert all(r.finish_reason == "abort" for r in unfinished)
    return batch, partial, turns


def test_unfinished_groups_are_kept_and_go_on_first_under_the_next_weights():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    first, partial, turns = kept_in_part(parts)
    assert first.counters["rollout/groups_partial"] == 1 and not first.dropped
    train(parts, first)
    parts.engine.version, parts.engine.asked = 1, []
    second = sample(parts, 1)
    request = parts.engine.asked[0]
    missing = tuple(r.index for r in partial.unfinished)
    assert (request.group_id, request.attempt, request.indices) == (0, 1, missing)
    assert dict(request.partial) == {r.index: r for r in partial.unfinished}
    group = second.groups[0]
    assert group.group_id == 0 and len(group.rollouts) == len(group.verdicts) == K
    for rollout in group.rollouts:
        length = length_of(0, rollout.index)
        assert rollout.weight_version == 0 and rollout.response_length == length == len(rollout.logprobs)
        assert rollout.spans == (((0, turns), (1, length - turns)) if length > turns else ((0, length),))
        assert rollout.attempt == (1 if length > turns else 0)
    assert first.response_tokens + second.response_tokens == parts.engine.generated
    assert second.counters["rollout/groups_resumed"] == 1 and second.counters["rollout/aborted_tokens"] == 0
    assert parts.sampler.ledger.retries == 0, "nothing failed"


def test_an_engine_that_starts_over_is_accepted_and_the_lost_tokens_are_counted():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    parts.engine.resumes = False
    first, partial, turns = kept_in_part(parts)
    train(parts, first)
    parts.engine.version, parts.engine.pace = 1, lambda group_id: 1
    second = sample(parts, 1)
    again = {r.index for r in partial.unfinished}
    assert {r.index for r in second.groups[0].rollouts if r.weight_version == 1} == again
    assert second.counters["rollout/aborted_tokens"] == turns * len(again)
    assert first.response_tokens + second.response_tokens == parts.engine.generated


def test_without_keep_surplus_unfinished_groups_are_dropped_with_their_tokens():
    parts = setup(rollout={"oversampling": 1.5})
    parts.engine.pace = lambda group_id: 4 if group_id == 0 else 1
    batch = sample(parts)
    assert ids(batch.dropped) == [0] and batch.snapshot.partial == ()
    assert 0 < len(batch.dropped[0].rollouts) < K, "what was finished is recorded"
    wasted = batch.counters["rollout/aborted_tokens"]
    assert tokens_of(batch.dropped) < wasted < sum(length_of(0, i) for i in range(K))
    assert batch.response_tokens == parts.engine.generated == wasted + tokens_of(batch.groups)


@pytest.mark.parametrize(("use_version", "usable"), [(1, True), (2, False)])
@pytest.mark.parametrize("updates", [1, 3])
def test_a_partial_group_that_is_too_old_at_use_is_dropped(use_version, usable, updates):
    parts = setup(rollout=KEEP | {"oversampling": 1.5}, updates=updates)
    first, partial, _ = kept_in_part(parts)
    train(parts, first)
    parts.engine.asked = []
    second = sample(parts, use_version * updates)
    assert (parts.engine.asked[0].group_id == 0) == usable
    assert (ids(second.dropped) == [0]) != usable
    assert second.counters["rollout/aborted_tokens"] == (0 if usable else partial.response_tokens)


def test_partial_groups_that_are_not_needed_wait_on():
    parts = setup(rollout=KEEP | {"prompts_per_step": 1, "oversampling": 4.0})
    parts.engine.pace = lambda group_id: 1 if group_id in (0, 3) else 5
    first = sample(parts)
    assert ids(first.groups) == [0] and ids(first.snapshot.carry) == [3] and ids(first.snapshot.partial) == [1, 2]
    train(parts, first)
    parts.engine.asked = []
    second = sample(parts, 1)
    assert ids(second.groups) == [3] and ids(second.snapshot.partial) == [1, 2] and not parts.engine.asked
    assert second.response_tokens == 0


def test_a_group_aborted_before_its_first_token_is_kept_whole():
    parts = setup(rollout=KEEP)
    parts.engine.pace = lambda group_id: SLOW if group_id == 0 else 1
    first = sample(parts)
    assert ids(first.snapshot.partial) == [0] and first.snapshot.partial[0].weight_version is None
    train(parts, first)
    parts.engine.pace, parts.engine.asked = (lambda group_id: 1), []
    assert ids(sample(parts, 99).groups)[0] == 0, "without a token it cannot be too old"
    assert parts.engine.asked[0].partial == {} and parts.engine.asked[0].indices == (0, 1, 2, 3)


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
    assert any("1 groups were still incomplete after 3 attempts" in m for m in parts.progress.messages)


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
    assert len(batch.groups[0].rollouts) == K and batch.response_tokens == parts.engine.generated


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
    parts = setup(deadlines=replace(FAST, generate=0.05))
    parts.engine.hangs = set(range(99))
    with pytest.raises(DeadlineError, match=r"deadline 'generate' \(the engine, with 4 groups in flight\)"):
        sample(parts)
    assert not parts.engine.running


def test_the_deadline_is_for_the_next_group_and_not_for_each():
    """Four groups of 0.1 s one after the other, with a deadline of 0.3 s: no wait is that long."""
    parts = setup(rollout={"prompts_per_step": 4, "oversampling": 1.0}, deadlines=replace(FAST, generate=0.3))
    slots, generate = asyncio.Semaphore(1), parts.engine.generate

    async def one_at_a_time(requests):
        async with slots:
            await asyncio.sleep(0.1)
            async for rollouts in generate(requests):
                yield rollouts

    parts.engine.generate = one_at_a_time
    assert len(sample(parts).groups) == 4


def test_a_group_that_does_not_hear_the_abort_is_left_behind(monkeypatch):
    monkeypatch.setattr(deadlines_module, "_GRACE_S", 0.05)
    parts = setup(rollout=KEEP, deadlines=replace(FAST, abort=0.05))
    parts.engine.deaf = {1}
    batch = sample(parts)
    assert any(
        "1 groups did not end within 0.05 s of their abort (the first: group 1)" in m for m in parts.progress.messages
    )
    assert ids(batch.snapshot.partial) == [1] and len(batch.groups) == 2
    assert saved(batch)["ledger"]["outstanding"]


def test_a_verifier_that_hangs_on_the_last_group_is_named():
    class Hangs(FakeScorer):
        async def score_async(self, pairs):
            self.hang = pairs[0][1] == "hard"
            return await super().score_async(pairs)

    parts = setup(deadlines=replace(FAST, score=0.2, abort=0.05), scorer=Hangs())
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="hard" if p.id == "p0" else "mixed") for p in give(n)
    ]
    with pytest.raises(DeadlineError, match=r"deadline 'score' \(group 0\)"):
        sample(parts)


def test_a_checkpoint_brings_partial_groups_back_exactly():
    rollout = KEEP | {"oversampling": 1.5}
    parts = setup(rollout=rollout)
    first, _, _ = kept_in_part(parts)
    state = saved(first)
    assert [record["finished"]["group_id"] for record in state["partial"]] == [0]
    resumed = setup(rollout=rollout)
    resumed.sampler.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.sampler.ledger.counts()["outstanding"] == 1
    train(parts, first)
    batches = []
    for which in (parts, resumed):
        which.engine.version, which.engine.pace = 1, lambda group_id: 1
        batches.append(sample(which, 1))
    assert plain(batches[0].groups) == plain(batches[1].groups) and 0 in ids(batches[1].groups)
    assert batches[0].counters == batches[1].counters
    assert parts.sampler.ledger.state_dict() == resumed.sampler.ledger.state_dict()
    assert parts.source.state_dict() == resumed.source.state_dict()


def remove(path):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def put(path, value):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        remove(["partial"]),
        remove(["partial", 0]),
        remove(["partial", 0, "unfinished", 0, "tokens"]),
        remove(["partial", 0, "finished", "prompt_id"]),
        put(["partial"], 7),
        put(["partial", 0], None),
        put(["partial", 0, "unfinished", 0, "logprobs"], [0.0]),
        put(["partial", 0, "unfinished", 0, "index"], K),
        put(["partial", 0, "unfinished", 0, "finish_reason"], "stop"),
        put(["partial", 0, "finished", "rollouts", 0, "finish_reason"], "abort"),
        put(["partial", 0, "finished", "group_id"], 77),
        remove(["counters", "rollout/batches_empty"]),
        remove(["ledger", "outstanding"]),
        put(["ledger", "outstanding"], []),
    ],
)
def test_a_torn_state_is_a_checkpoint_error(change):
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    state = saved(kept_in_part(parts)[0])
    setup(rollout=KEEP).sampler.load_state_dict(state)
    change(state)
    with pytest.raises(CheckpointError, match=r"[Uu]se an earlier checkpoint"):
        setup(rollout=KEEP).sampler.load_state_dict(state)


def test_counts_since_the_beginning_go_on_after_a_resume():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    first, _, _ = kept_in_part(parts)
    train(parts, first)
    parts.engine.resumes = False  # so that tokens are thrown away, too
    second = sample(parts, 1)
    names = ("rollout/groups_aborted", "rollout/groups_resumed", "rollout/aborted_tokens")
    assert all(second.counters[name] > 0 for name in names), second.counters
    resumed = setup(rollout={"oversampling": 1.0} | KEEP)
    resumed.sampler.load_state_dict(saved(second))
    third = sample(resumed, 1)
    assert all(third.counters[name] >= second.counters[name] for name in names)


def test_an_answer_cut_before_its_first_token_or_after_its_last_cannot_go_on():
    """Nothing is there to go on from, or no token is left to be asked for: the next attempt starts over."""
    parts = setup(filter_groups=False, rollout={"oversampling": 1.0, "prompts_per_step": 1})
    longest = SamplingParams().max_new_tokens

    async def generate(requests):
        parts.engine.asked += requests
        (request,) = requests
        lengths = {0: 0, 1: longest, 2: longest - 1} if request.attempt == 0 else {}
        yield tuple(cut(request, index, lengths.get(index)) for index in request.indices)

    parts.engine.generate = generate
    batch = sample(parts)
    assert [sorted(request.partial) for request in parts.engine.asked] == [[], [2]]
    assert parts.engine.asked[1].indices == (0, 1, 2)
    assert batch.counters["rollout/aborted_tokens"] == longest + longest - 1


def cut(request, index, length):
    """A finished rollout, or one that was cut off at this length."""
    rollout = make_rollout(request.group_id, request.attempt, index, request.prompt, 0, length=length or 5)
    if length == 0:
        rollout = replace(
            rollout, tokens=rollout.tokens[:2], logprobs=rollout.logprobs[:0], loss_mask=rollout.loss_mask[:0]
        )
    return rollout if length is None else replace(rollout, finish_reason="abort")


def test_a_checkpoint_that_knows_no_partial_groups_still_loads():
    parts = setup(rollout={"oversampling": 1.0})
    state = saved(sample(parts))
    del state["partial"]
    state["counters"] = {"rollout/batches_empty": 3}
    resumed = setup()
    resumed.sampler.load_state_dict(state)
    assert sample(resumed).counters["rollout/batches_empty"] == 3


def test_rounds_that_wait_for_all_drop_unfinished_groups_of_a_checkpoint_and_say_so():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    first, partial, _ = kept_in_part(parts)
    resumed = setup(rollout=KEEP, finish_early=False)
    resumed.sampler.load_state_dict(saved(first))

    async def all_at_once(requests):
        for request in requests:
            async for rollouts in FleetEngine().generate([request]):
                yield rollouts

    resumed.engine.generate = all_at_once
    batch = sample(resumed, 1)
    assert ids(batch.dropped) == [0] and batch.counters["rollout/aborted_tokens"] == partial.response_tokens
    assert any(
        "1 unfinished groups are dropped: rollout.finish_batch is all now" in m for m in resumed.progress.messages
    )


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
@settings(max_examples=60, deadline=None)
def test_the_books_add_up_whatever_the_engine_does(fates, paces, filter_groups, resumes, keep, oversampling, restart):
    """Every group is in exactly one place, and every generated token is in it or was counted as thrown away."""
    rollout = {"prompts_per_step": 3, "oversampling": oversampling, "max_refill_rounds": 9} | (KEEP if keep else {})
    ended: list = []
    parts, generated, lost, received = setup(filter_groups, rollout), 0, 0, 0
    for version in range(4):
        arrange(parts.engine, fates, paces)
        parts.engine.version, parts.engine.resumes = version, resumes
        batch = sample(parts, version)
        received += batch.response_tokens
        waiting = [*batch.snapshot.carry, *(p.finished for p in batch.snapshot.partial)]
        ended += [*batch.filtered, *batch.dropped]
        everywhere = count_ids(ended, batch.groups, waiting)
        counts = parts.sampler.ledger.counts()
        assert everywhere == dict.fromkeys(range(counts["admitted"]), 1)
        assert counts["outstanding"] == len(batch.groups) + len(waiting)
        unused = sum(p.response_tokens for p in batch.snapshot.partial) + tokens_of(batch.snapshot.carry)
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
            parts.sampler.load_state_dict(state)


def arrange(engine, fates, paces):
    """Groups of a fate each: `slow` ends by an abort mostly, `flaky` loses two rollouts at first, `dead` always one."""

    def fate(group_id):
        return fates[group_id % len(fates)]

    engine.pace = lambda group_id: paces[group_id % len(paces)] * (20 if fate(group_id) == "slow" else 1)
    engine.lost = {(i, 0, j) for i in range(400) if fate(i) == "flaky" for j in (0, 2)}
    engine.lost |= {(i, attempt, 1) for i in range(400) if fate(i) == "dead" for attempt in range(30)}
