"""Groups that are unfinished when their batch is full: what is kept, how it goes on, and that a checkpoint has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet_fakes import (
    KEEP,
    SLOW,
    FleetEngine,
    ids,
    kept_in_part,
    length_of,
    plain,
    sample,
    saved,
    setup,
    tokens_of,
    train,
)
from loop_fakes import FakeScorer, K, make_rollout

from megatron_daro.environments.several_environments import Mixed
from megatron_daro.errors import CheckpointError
from megatron_daro.rollout.rollouter import SingleTurn
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.types import SamplingParams, Verdict


def test_unfinished_groups_are_kept_and_go_on_first_under_the_next_weights():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    first, group_0, turns = kept_in_part(parts)
    assert first.counters["rollout/groups_unfinished"] == 1 and not first.dropped
    train(parts, first)
    parts.engine.version, parts.engine.asked = 1, []
    second = sample(parts, 1)
    request = parts.engine.asked[0]
    missing = tuple(r.index for r in group_0.partial)
    assert (request.group_id, request.attempt, request.indices) == (0, 1, missing)
    assert dict(request.partial) == {r.index: r for r in group_0.partial}
    group = second.groups[0]
    assert group.group_id == 0 and len(group.rollouts) == len(group.verdicts) == K
    for rollout in group.rollouts:
        length = length_of(0, rollout.index)
        assert rollout.weight_version == 0 and rollout.response_length == length == len(rollout.logprobs)
        assert rollout.version_spans == (((0, turns), (1, length - turns)) if length > turns else ((0, length),))
        assert rollout.attempt == (1 if length > turns else 0)
    assert first.generated_tokens + second.generated_tokens == parts.engine.generated
    assert second.counters["rollout/groups_resumed"] == 1 and second.counters["rollout/aborted_tokens"] == 0
    assert parts.sampler.ledger.retries == 0, "nothing failed"


@pytest.mark.parametrize("turns", [0, 1])
def test_with_several_environments_single_answers_go_on_and_conversations_begin_again(turns):
    class Talking(SingleTurn):
        async def generate(self, requests):
            async for rollouts in super().generate(requests):
                yield tuple(replace(one, turns=((0, one.response_length),) * turns) for one in rollouts)

    engine = FleetEngine()
    own = Mixed({"own": Talking(engine, FakeScorer())}, {"fake": "own"})
    parts = setup(rollout=KEEP | {"oversampling": 1.5}, engine=engine, rollouter=own)
    engine.pace = lambda group_id: 4 if group_id == 0 else 1
    first = sample(parts)
    assert ids(first.snapshot.unfinished) == [0]
    train(parts, first)
    engine.version, engine.asked = 1, []
    sample(parts, 1)
    request = engine.asked[0]
    assert request.group_id == 0 and set(request.partial) == (set() if turns else set(request.indices))


def test_an_engine_that_starts_over_is_accepted_and_the_lost_tokens_are_counted():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    parts.engine.resumes = False
    first, group_0, turns = kept_in_part(parts)
    train(parts, first)
    parts.engine.version, parts.engine.pace = 1, lambda group_id: 1
    second = sample(parts, 1)
    again = {r.index for r in group_0.partial}
    assert {r.index for r in second.groups[0].rollouts if r.weight_version == 1} == again
    assert second.counters["rollout/aborted_tokens"] == turns * len(again)
    assert first.generated_tokens + second.generated_tokens == parts.engine.generated


def test_without_keep_surplus_unfinished_groups_are_dropped_with_their_tokens():
    parts = setup(rollout={"oversampling": 1.5})
    parts.engine.pace = lambda group_id: 4 if group_id == 0 else 1
    batch = sample(parts)
    assert ids(batch.dropped) == [0] and batch.snapshot.unfinished == ()
    assert 0 < len(batch.dropped[0].rollouts) < K, "what was finished is recorded"
    wasted = batch.counters["rollout/aborted_tokens"]
    assert tokens_of(batch.dropped) < wasted < sum(length_of(0, i) for i in range(K))
    assert batch.generated_tokens == parts.engine.generated == wasted + tokens_of(batch.groups)


@pytest.mark.parametrize(("use_version", "usable"), [(1, True), (2, False)])
@pytest.mark.parametrize("steps_per_batch", [1, 3])
def test_an_unfinished_group_that_is_too_old_at_use_is_dropped(use_version, usable, steps_per_batch):
    parts = setup(rollout=KEEP | {"oversampling": 1.5}, steps_per_batch=steps_per_batch)
    first, group_0, _ = kept_in_part(parts)
    train(parts, first)
    parts.engine.asked = []
    second = sample(parts, use_version * steps_per_batch)
    assert (parts.engine.asked[0].group_id == 0) == usable
    assert (ids(second.dropped) == [0]) != usable
    assert second.counters["rollout/aborted_tokens"] == (0 if usable else group_0.generated_tokens)


def test_unfinished_groups_that_are_not_needed_wait_on():
    parts = setup(rollout=KEEP | {"prompts_per_batch": 1, "oversampling": 4.0})
    parts.engine.pace = lambda group_id: 1 if group_id in (0, 3) else 5
    first = sample(parts)
    assert ids(first.groups) == [0] and ids(first.snapshot.surplus) == [3] and ids(first.snapshot.unfinished) == [1, 2]
    train(parts, first)
    parts.engine.asked = []
    second = sample(parts, 1)
    assert ids(second.groups) == [3] and ids(second.snapshot.unfinished) == [1, 2] and not parts.engine.asked
    assert second.generated_tokens == 0


def test_a_group_aborted_before_its_first_token_is_kept_whole():
    parts = setup(rollout=KEEP)
    parts.engine.pace = lambda group_id: SLOW if group_id == 0 else 1
    first = sample(parts)
    assert ids(first.snapshot.unfinished) == [0] and first.snapshot.unfinished[0].weight_version is None
    train(parts, first)
    parts.engine.pace, parts.engine.asked = (lambda group_id: 1), []
    assert ids(sample(parts, 99).groups)[0] == 0, "without a token it cannot be too old"
    assert parts.engine.asked[0].partial == {} and parts.engine.asked[0].indices == (0, 1, 2, 3)


def test_an_answer_cut_before_its_first_token_or_after_its_last_cannot_go_on():
    """Nothing is there to go on from, or no token is left to be asked for: the next attempt starts over."""
    parts = setup(filter_groups=False, rollout={"oversampling": 1.0, "prompts_per_batch": 1})
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


def test_a_checkpoint_brings_unfinished_groups_back_exactly():
    rollout = KEEP | {"oversampling": 1.5}
    parts = setup(rollout=rollout)
    first, _, _ = kept_in_part(parts)
    state, waiting = saved(first)
    assert [record.group.group_id for record in waiting] == [0] and waiting[0].partial
    resumed = setup(rollout=rollout)
    resumed.sampler.load_state_dict(state, waiting)
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


def test_answers_of_a_checkpoint_whose_files_of_experts_went_with_a_later_step_are_asked_for_again(tmp_path):
    rollout, folder = KEEP | {"oversampling": 1.5}, ExpertsFolder(tmp_path)
    parts = setup(rollout=rollout)
    state, (record,) = saved(kept_in_part(parts)[0])

    def routed(one):
        rows = len(one.tokens) - 1
        stored = folder.store((one.group_id, one.attempt, one.index), np.zeros((rows, 1, 1)), len(one.tokens))
        return replace(one, routed_experts=stored)

    group = replace(record.group, rollouts=tuple(map(routed, record.group.rollouts)))
    record = replace(record, group=group, partial=tuple(map(routed, record.partial)))
    kept, *lost = (*record.group.rollouts, *record.partial)
    folder.settle({0: (kept.routed_experts,)})
    resumed = setup(rollout=rollout)
    resumed.sampler.load_state_dict(state, [record])
    batch = sample(resumed, 1)
    (request,) = (one for one in resumed.engine.asked if one.group_id == 0)
    assert set(request.indices) == {one.index for one in lost} and not request.partial
    assert [one.index for one in batch.groups[0].rollouts if one.routed_experts] == [kept.index]
    assert batch.counters["rollout/aborted_tokens"] == sum(one.response_length for one in lost)
    assert any("experts" in message for message in resumed.progress.messages)


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
        remove(["counters", "rollout/batches_empty"]),
        remove(["counters", "rollout/groups_aborted"]),
        remove(["ledger", "outstanding"]),
        put(["ledger", "outstanding"], []),
    ],
)
def test_a_torn_state_is_a_checkpoint_error(change):
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    state, waiting = saved(kept_in_part(parts)[0])
    setup(rollout=KEEP).sampler.load_state_dict(state, waiting)
    change(state)
    with pytest.raises(CheckpointError):
        setup(rollout=KEEP).sampler.load_state_dict(state, waiting)


def edited(record, **changes):
    """The record with its first unfinished rollout changed."""
    return replace(record, partial=(replace(record.partial[0], **changes), *record.partial[1:]))


def aborted(record):
    """The record's group with an aborted rollout among its finished ones."""
    return replace(record.group, rollouts=record.partial, verdicts=(Verdict(True, 1.0, "match"),))


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: [],
        lambda record: [record, record],
        lambda record: [replace(record, group=replace(record.group, group_id=77))],
        lambda record: [edited(record, index=K)],
        lambda record: [edited(record, index=record.group.rollouts[0].index)],
        lambda record: [edited(record, finish_reason="stop")],
        lambda record: [replace(record, group=aborted(record))],
    ],
)
def test_waiting_groups_that_contradict_the_state_are_a_checkpoint_error(damage):
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    state, (record,) = saved(kept_in_part(parts)[0])
    assert record.partial and record.group.rollouts
    with pytest.raises(CheckpointError):
        setup(rollout=KEEP).sampler.load_state_dict(state, damage(record))


def test_counts_since_the_beginning_go_on_after_a_resume():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    first, _, _ = kept_in_part(parts)
    train(parts, first)
    parts.engine.resumes = False  # so that tokens are thrown away, too
    second = sample(parts, 1)
    names = ("rollout/groups_aborted", "rollout/groups_resumed", "rollout/aborted_tokens")
    assert all(second.counters[name] > 0 for name in names), second.counters
    resumed = setup(rollout=KEEP)
    resumed.sampler.load_state_dict(*saved(second))
    third = sample(resumed, 2)
    assert all(third.counters[name] >= second.counters[name] for name in names)


def test_rounds_that_wait_for_all_go_on_with_unfinished_groups_of_a_checkpoint():
    parts = setup(rollout=KEEP | {"oversampling": 1.5})
    first, _, _ = kept_in_part(parts)
    resumed = setup(rollout=KEEP, finish_batch="all")
    resumed.sampler.load_state_dict(*saved(first))

    async def all_at_once(requests):
        for request in requests:
            async for rollouts in FleetEngine().generate([request]):
                yield rollouts

    resumed.engine.generate = all_at_once
    batch = sample(resumed, 1)
    assert 0 in ids(batch.groups) and not batch.dropped and batch.counters["rollout/groups_resumed"] == 1
