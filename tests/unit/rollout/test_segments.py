"""Answers in segments (Kimi k1.5's partial rollouts): what a batch gives one, what is set aside, and how it goes on."""

from __future__ import annotations

from dataclasses import replace

import fleet_fakes
import numpy as np
import pytest
from books import check_books, recorded_once
from fleet_fakes import LONGEST, FleetEngine, count_ids, ids, plain, sample, saved, setup, train
from loop_fakes import Crash, K, make_stack, resume_stack, run_stack

from megatron_daro.errors import CheckpointError
from megatron_daro.observe.metrics import comparable, read_metrics
from megatron_daro.rollout.recorder import read_step, recorded_steps

SEGMENT = 3
ROLLOUT = {"segment_tokens": SEGMENT, "max_response_tokens": LONGEST, "max_staleness": 3}


def length_of(group_id, index):
    """Two groups of three end within a segment; in the others answers have 2, 4, 6 and 8 tokens."""
    return 2 + index % 2 if group_id % 3 else 2 + (group_id + index) * 2 % LONGEST


@pytest.fixture(autouse=True)
def lengths(monkeypatch):
    monkeypatch.setattr(fleet_fakes, "length_of", length_of)


class RoundsEngine(FleetEngine):
    """All groups of a round in one call; every answer gets what its request allows."""

    async def generate(self, requests):
        self.asked += requests
        for request in requests:
            yield tuple(self._rollout(request, index, LONGEST) for index in request.indices)


def check_segments(groups):
    """Every answer is whole, and no version of the weights gave it more than a segment."""
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.response_length == length_of(group.group_id, rollout.index)
            counts = [tokens for _, tokens in rollout.version_spans]
            assert counts == [SEGMENT] * (len(counts) - 1) + [counts[-1]] and 1 <= counts[-1] <= SEGMENT
            assert rollout.finish_reason == "stop" and rollout.weight_version == rollout.version_spans[0][0]


@pytest.mark.parametrize("finish_batch", ["enough", "all"])
def test_an_answer_gets_a_segment_in_each_batch_until_it_is_whole(finish_batch):
    engine = FleetEngine() if finish_batch == "enough" else RoundsEngine()
    parts = setup(rollout={"oversampling": 1.0, **ROLLOUT}, engine=engine, finish_batch=finish_batch)
    groups = []
    for version in range(6):
        parts.engine.version = version
        before = len(parts.engine.asked)
        batch = sample(parts, version)
        train(parts, batch)
        groups += batch.groups
        asked = count_ids(parts.engine.asked[before:])
        assert set(asked.values()) == {1}, "what is set aside in a batch is not asked for again in it"
    check_segments(groups)
    assert len(groups) >= 8 and len(set(ids(groups))) == len(groups)
    spans = {len(rollout.version_spans) for group in groups for rollout in group.rollouts}
    assert spans == {1, 2, 3}, "answers of 2, 4, 6 and 8 tokens"
    assert batch.snapshot.unfinished, "some wait"
    for request in parts.engine.asked:
        for index in request.indices:
            earlier = request.partial.get(index)
            begun = earlier.response_length if earlier else 0
            assert request.limits[index] == begun + SEGMENT


def test_an_answer_goes_on_in_a_batch_that_surplus_fills():
    parts = setup(rollout={**ROLLOUT, "prompts_per_batch": 1, "oversampling": 3.0}, engine=RoundsEngine())
    first = sample(parts)
    assert ids(first.groups) == [1] and ids(first.snapshot.surplus) == [2] and ids(first.snapshot.unfinished) == [0]
    train(parts, first)
    parts.engine.asked = []
    second = sample(parts, 1)
    assert ids(second.groups) == [2] and [request.group_id for request in parts.engine.asked] == [0]


class Reader:
    """A teacher that writes down what it reads."""

    def __init__(self):
        self.seen = []

    async def read(self, rollouts):
        self.seen += rollouts
        return [replace(r, teacher_logprobs=np.zeros(r.response_length, np.float32)) for r in rollouts]


def test_a_teacher_reads_an_answer_when_it_is_whole():
    engine, teacher = FleetEngine(), Reader()
    parts = setup(rollout={"oversampling": 1.0, **ROLLOUT}, engine=engine, teacher=teacher)
    groups = []
    for version in range(4):
        batch = sample(parts, version)
        train(parts, batch)
        groups += batch.groups
    assert max(rollout.response_length for rollout in teacher.seen) > SEGMENT
    assert all(r.response_length == length_of(r.group_id, r.index) for r in teacher.seen)
    assert len(teacher.seen) == len({(r.group_id, r.index) for r in teacher.seen}), "once"
    assert all(len(r.teacher_logprobs) == r.response_length for group in groups for r in group.rollouts)


def test_a_checkpoint_keeps_what_is_set_aside():
    parts, again = (setup(rollout={"oversampling": 1.0, **ROLLOUT}) for _ in range(2))
    batch = sample(parts)
    train(parts, batch)
    again.sampler.load_state_dict(*saved(batch))
    for version in (1, 2):
        for one in (parts, again):
            one.engine.version = version
        following = [sample(one, version) for one in (parts, again)]
        assert plain(following[0].groups) == plain(following[1].groups)
        for one, batch in zip((parts, again), following, strict=True):
            train(one, batch)
    assert any(len(r.version_spans) == 3 for group in following[0].groups for r in group.rollouts)


def test_what_is_set_aside_needs_room_to_go_on():
    parts = setup(rollout={"oversampling": 1.0, **ROLLOUT})
    batch = sample(parts)
    train(parts, batch)
    state, waiting = saved(batch)
    assert max(r.response_length for record in waiting for r in record.partial) == SEGMENT
    full = setup(rollout={"oversampling": 1.0, **ROLLOUT, "max_response_tokens": SEGMENT})
    with pytest.raises(CheckpointError, match=f"rollout.max_response_tokens: got {SEGMENT}.*allowed: {SEGMENT + 1} or"):
        full.sampler.load_state_dict(state, waiting)


def test_a_run_in_segments_that_crashed_goes_on_bit_for_bit(tmp_path):
    """Rounds repeat exactly, whoever is set aside."""
    options = {"engine_class": RoundsEngine, "rollout": {"prompts_per_batch": 3, **ROLLOUT}, "filter_groups": False}
    whole = make_stack(tmp_path / "whole", **options)
    run_stack(whole)
    stack = make_stack(tmp_path / "crashed", crash=("train", 4, "exit"), **options)
    with pytest.raises(Crash):
        run_stack(stack)
    stack = make_stack(tmp_path / "crashed", **options)
    resume_stack(stack)
    assert stack.policy.weights == whole.policy.weights
    lines = [[comparable(line) for line in read_metrics(tmp_path / run)] for run in ("whole", "crashed")]
    assert lines[0] == lines[1]
    check_books(tmp_path / "whole")
    trained = [group for _, group, used in recorded_once(tmp_path / "whole") if used == "trained"]
    check_segments(trained)
    versions = [r.version_spans for group in trained for r in group.rollouts]
    assert any(len(spans) == 3 for spans in versions) and all(len(group.rollouts) == K for group in trained)
    for step in recorded_steps(tmp_path / "whole"):
        for group, used in read_step(tmp_path / "whole", step):
            assert used != "trained" or step - 1 - group.weight_version <= ROLLOUT["max_staleness"]


@pytest.mark.parametrize("finish_batch", ["enough", "all"])
def test_groups_that_go_on_do_not_keep_filtered_ones_from_being_replaced(finish_batch, monkeypatch):
    monkeypatch.setattr(fleet_fakes, "length_of", lambda group_id, index: LONGEST if group_id < 4 else 1 + index % 2)
    rollout = {"prompts_per_batch": 4, "oversampling": 1.0, "segment_tokens": 2, "max_response_tokens": LONGEST}
    engine = FleetEngine() if finish_batch == "enough" else RoundsEngine()
    parts = setup(True, rollout | {"max_staleness": LONGEST}, engine, finish_batch=finish_batch)
    batch = sample(parts)
    assert batch.filtered and len(batch.groups) == 4 and ids(batch.snapshot.unfinished)[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("finish_batch", ["enough", "all"])
def test_a_batch_is_not_given_up_before_its_longest_groups_can_have_ended(finish_batch, monkeypatch):
    """Every second problem is easy and its answers short: the filter takes these out while the others go on."""
    monkeypatch.setattr(fleet_fakes, "length_of", lambda group_id, index: LONGEST if group_id % 2 else 1)
    rollout = {"prompts_per_batch": 4, "oversampling": 1.0, "segment_tokens": 1, "max_response_tokens": LONGEST}
    engine = FleetEngine() if finish_batch == "enough" else RoundsEngine()
    parts = setup(True, rollout | {"max_staleness": LONGEST}, engine, finish_batch=finish_batch)
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="mixed" if int(p.id[1:]) % 2 else "easy") for p in give(n)
    ]
    batch = sample(parts)
    assert batch.groups and all(group.group_id % 2 for group in batch.groups)
    assert all(rollout.response_length == LONGEST for group in batch.groups for rollout in group.rollouts)
