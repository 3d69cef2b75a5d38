"""Recorded batches one at a time, written by hand: which groups train, what the books say, what is refused."""

from __future__ import annotations

import asyncio

import pytest
from loop_fakes import K, make_rollout

from megatron_daro.config.sections import TrainerSection
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.types import Group, Prompt, Verdict

PROMPT = Prompt("p", "4", "unit", tokens=(1, 2))


def group(group_id, size=K) -> Group:
    rollouts = tuple(make_rollout(group_id, 0, i, PROMPT, 0, length=2) for i in range(size))
    return Group(group_id, PROMPT, rollouts, (Verdict(True, 1.0, "m"),) * size)


def record(run, step, minibatch, **outcomes) -> None:
    """A step with groups of these ids by outcome. minibatch: (first step, epoch, ids, applied)."""
    groups = {outcome: [group(i) for i in ids] for outcome, ids in outcomes.items()}
    Recorder(run).write_step(step, groups, RecordedMiniBatch(step, *minibatch))


def source(run, size=K, deadlines=Deadlines(), **section) -> ReplaySource:
    return ReplaySource(run, section=TrainerSection(**section), rollouts_per_prompt=size, deadlines=deadlines)


def ids(groups) -> list[int]:
    return [one.group_id for one in groups]


def sampled(one):
    return asyncio.run(one.sample(0))


def test_a_batch_has_what_trained_and_beside_it_what_did_not(tmp_path):
    record(tmp_path, 1, (1, 1, (5, 1), True), trained=[5, 1], filtered=[2], dropped=[3])
    record(tmp_path, 2, (1, 1, (4,), False), trained=[4], filtered=[6])
    record(tmp_path, 3, (3, 1, (7,), True), trained=[7])
    one = source(tmp_path, minibatches_per_batch=2)
    batch = sampled(one)
    assert (ids(batch.groups), ids(batch.filtered), ids(batch.dropped)) == ([5, 1], [2, 6], [3, 4])
    assert batch.recorded == (RecordedMiniBatch(1, 1, 1, (5, 1), True),), "a step of one epoch that failed is left out"
    assert batch.snapshot.source == {"last_step": 2}
    assert one.ledger.counts() == {"admitted": 6, "trained": 0, "filtered": 2, "dropped": 2, "outstanding": 2}
    assert ids(sampled(one).groups) == [7] and sampled(one) is None


def test_a_failed_step_of_the_first_epoch_is_kept_where_a_later_one_trains_its_groups(tmp_path):
    record(tmp_path, 1, (1, 1, (0,), False), dropped=[0])
    record(tmp_path, 2, (1, 2, (0,), True))
    batch = sampled(source(tmp_path, epochs_per_batch=2))
    assert [(one.step, one.applied) for one in batch.recorded] == [(1, False), (2, True)] and ids(batch.groups) == [0]
    record(tmp_path, 2, (1, 2, (0,), False))
    assert sampled(source(tmp_path, epochs_per_batch=2)) is None
    record(tmp_path, 1, (1, 1, (0,), True), trained=[0])
    (only,) = sampled(source(tmp_path, epochs_per_batch=2)).recorded
    assert only.step == 1, "a later one that failed is left out"


def test_a_batch_that_trained_nothing_is_passed_over_and_one_beyond_the_last_step_too(tmp_path):
    record(tmp_path, 1, (1, 1, (0,), False), dropped=[0])
    record(tmp_path, 2, (2, 1, (1,), True), trained=[1])
    record(tmp_path, 3, (3, 1, (2,), True), trained=[2])
    one = source(tmp_path, steps=2)
    assert ids(sampled(one).groups) == [1] and sampled(one) is None


def test_steps_beyond_the_last_one_of_a_batch_are_left_out(tmp_path):
    record(tmp_path, 1, (1, 1, (0,), True), trained=[0, 1])
    record(tmp_path, 2, (1, 1, (1,), True))
    batch = sampled(source(tmp_path, steps=1, minibatches_per_batch=2))
    assert len(batch.recorded) == 1 and ids(batch.groups) == [0] and ids(batch.dropped) == [1]


@pytest.mark.parametrize(
    "state", [{"last_step": "x"}, {"last_step": None}, {"cursor": 3}, {"last_step": 1, "no": "ledger"}]
)
def test_a_torn_state_is_refused(tmp_path, state):
    record(tmp_path, 1, (1, 1, (0,), True), trained=[0])
    torn = {"source": state} | ({} if "no" in state else {"ledger": source(tmp_path).ledger.state_dict()})
    with pytest.raises(CheckpointError):
        source(tmp_path).load_state_dict(torn)


@pytest.mark.parametrize(("steps", "missing"), [((1, 2, 5), 3), ((2, 3), 1)])
def test_a_gap_is_named_by_its_first_step_and_so_is_a_recording_without_its_start(tmp_path, steps, missing):
    for step in steps:
        record(tmp_path, step, (step, 1, (step,), True), trained=[step])
    with pytest.raises(DataError, match=f"step {missing} is missing"):
        source(tmp_path)


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ({"minibatches_per_batch": 2, "epochs_per_batch": 2}, False),
        ({"minibatches_per_batch": 4, "epochs_per_batch": 1}, True),
        ({"minibatches_per_batch": 1, "epochs_per_batch": 3}, True),
        ({"minibatches_per_batch": 3, "epochs_per_batch": 3}, False),
    ],
)
def test_a_batch_of_more_steps_or_epochs_than_this_runs_is_refused(tmp_path, section, refused):
    for step in range(1, 5):
        record(tmp_path, step, (1, 1 + step // 3, (step % 2,), True), trained=[0, 1] if step == 1 else [])
    if not refused:
        assert len(sampled(source(tmp_path, **section)).recorded) == 4
        return
    with pytest.raises(DataError, match=r"step 1 .*trainer\.minibatches_per_batch.*trainer\.epochs_per_batch"):
        source(tmp_path, **section)


def test_a_later_batch_is_compared_with_this_runs_steps_too(tmp_path):
    record(tmp_path, 1, (1, 1, (0,), True), trained=[0])
    record(tmp_path, 2, (2, 1, (1,), True), trained=[1])
    record(tmp_path, 3, (2, 1, (2,), True), trained=[2])
    one = source(tmp_path)
    assert ids(sampled(one).groups) == [0]
    with pytest.raises(DataError, match="step 2"):
        sampled(one)


def test_a_group_that_no_file_has_and_one_of_another_size_are_refused(tmp_path):
    record(tmp_path, 1, (1, 1, (0, 9), True), trained=[0])
    with pytest.raises(DataError, match="group 9"):
        sampled(source(tmp_path))
    with pytest.raises(DataError, match=r"rollout\.rollouts_per_prompt is 8"):
        sampled(source(tmp_path, size=8))


def test_a_run_without_recorded_steps_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"observe\.save_rollouts"):
        source(tmp_path)
