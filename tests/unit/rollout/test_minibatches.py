"""The steps that a batch becomes: mini-batches, epochs, what is too old, and a recorded batch as it was recorded."""

from __future__ import annotations

from dataclasses import replace

from loop_fakes import K, make_rollout

from megatron_daro.config.sections import TrainerSection
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.minibatches import epoch_order, plan_minibatches, planned_steps
from megatron_daro.rollout.recorder import RecordedMiniBatch
from megatron_daro.rollout.sampled_batch import SampledBatch, Snapshot
from megatron_daro.types import Group, Prompt, Verdict

PROMPT = Prompt("p", "4", "unit", tokens=(1, 2))


def rollout(index=0, length=3, *, group_id=0, version=3, finish="stop", **changes):
    return replace(make_rollout(group_id, 0, index, PROMPT, version, finish=finish, length=length), **changes)


def group(group_id, right=1, size=K, version=3) -> Group:
    rollouts = tuple(rollout(i, group_id=group_id, version=version) for i in range(size))
    return Group(group_id, PROMPT, rollouts, tuple(Verdict(i < right, 1.0, "m") for i in range(size)))


def record(finished, *unfinished) -> RecordedGroup:
    return RecordedGroup(group(4, size=finished), None, tuple(rollout(i, finish="abort") for i in unfinished))


def batch_of(*ids, **others) -> SampledBatch:
    return SampledBatch(tuple(group(i) for i in ids), Snapshot({}, {}), **others)


def planned(batch, step=0, **section):
    minibatches, unused = plan_minibatches(batch, step, TrainerSection(**{"steps": 50} | section))
    return minibatches, [one.group_id for one in unused]


def test_mini_batches_are_consecutive_and_as_even_as_can_be():
    batch = batch_of(*range(5), filtered=(group(9),))
    minibatches, unused = planned(batch, 4, minibatches_per_batch=3)
    assert [[g.group_id for g in one.groups] for one in minibatches] == [[0], [1, 2], [3, 4]] and unused == []
    assert [(one.step, one.batch_version, one.first_step, one.epoch) for one in minibatches] == [
        (i, 4, 5, 1) for i in (5, 6, 7)
    ]
    assert [one.first for one in minibatches] == [True, False, False] == [one.last for one in reversed(minibatches)]
    assert [len(one.filtered) for one in minibatches] == [1, 0, 0]
    assert not any(g.group_id in one.again for one in minibatches for g in one.groups)
    assert minibatches[1].record(applied=False) == RecordedMiniBatch(6, 5, 1, (1, 2), False)
    assert planned_steps(batch, 4, TrainerSection(minibatches_per_batch=3, epochs_per_batch=2)) == 6
    assert planned_steps(batch, 4, TrainerSection(minibatches_per_batch=9)) == 5


def test_further_epochs_take_all_groups_again_in_another_order():
    minibatches, _ = planned(batch_of(*range(6)), 4, minibatches_per_batch=2, epochs_per_batch=3, seed=1)
    assert [(one.step, one.epoch) for one in minibatches] == [(5, 1), (6, 1), (7, 2), (8, 2), (9, 3), (10, 3)]
    order = [[g.group_id for one in minibatches if one.epoch == epoch for g in one.groups] for epoch in (1, 2, 3)]
    assert order[0] == list(range(6)) and order[1:] == [epoch_order(6, 1, 5, epoch) for epoch in (2, 3)]
    assert [len(one.again) for one in minibatches] == [6, 6, 6, 6, 3, 0]
    assert minibatches[4].again == {g.group_id for g in minibatches[5].groups}


def test_groups_beyond_the_last_step_are_unused():
    minibatches, unused = planned(batch_of(1, 2, 3), 9, minibatches_per_batch=3, steps=11)
    assert [[g.group_id for g in one.groups] for one in minibatches] == [[1], [2]] and unused == [3]
    assert minibatches[1].last


def test_a_recorded_batch_has_its_recorded_steps():
    records = RecordedMiniBatch(7, 7, 1, (1, 0), False), RecordedMiniBatch(8, 7, 2, (0, 1), True)
    batch = batch_of(0, 1, recorded=records)
    minibatches, _ = planned(batch, 6)
    assert [(one.step, one.trains, one.epoch, one.first_step, one.batch_version) for one in minibatches] == [
        (7, False, 1, 7, 6), (8, True, 2, 7, 6),
    ]  # fmt: skip
    assert [[g.group_id for g in one.groups] for one in minibatches] == [[1, 0], [0, 1]]
    assert [one.first for one in minibatches] == [one.last for one in minibatches] == [False, True]
    assert planned_steps(batch, 6, TrainerSection()) == 2
