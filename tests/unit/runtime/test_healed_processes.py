"""Lost ranks at the borders of what can be healed: limits, memory, places. That every step is trained once, wherever a
rank dies, is shown in tests/simulation and tests/fault."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from rank_processes import BATCH, LIMITS, run, steps

from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import WorkerError
from megatron_daro.runtime import healing


def test_replacements_of_more_than_an_hour_ago_do_not_count(world, monkeypatch):
    one, clock = world(dataclasses.replace(LIMITS, per_hour=1)), [0.0]
    clocks = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])
    monkeypatch.setattr(healing, "time", clocks)

    async def train():
        await one.policy.start()
        for step, clock[0] in ((1, 0.0), (2, 3601.0)):
            one.process(1).dies_at = "train"
            await steps(one.policy, step, step)
        clock[0] = 7201.0
        one.process(1).dies_at = "train"
        with pytest.raises(WorkerError, match=r"rank 1.*trainer\.max_replacements"):
            await steps(one.policy, 3, 3)

    run(train())
    assert len(one.started) == 4 + 2


def test_columns_that_were_lost_with_a_rank_are_sent_with_the_batch(world):
    one = world(LIMITS, algorithm=AlgorithmSection(name="grpo", old_logprobs="recompute"))

    async def train():
        await one.policy.start()
        prepared = [await one.policy.prepare(dataclasses.replace(BATCH, opens_batch=first)) for first in (True, False)]
        one.process(2).dies_at = "train"
        for step, minibatch in enumerate(prepared, 1):
            await one.policy.train(minibatch, step)
        return one.seen

    assert run(train()) == [[0, 1, 2]] * 4
    assert len(one.started) == 5


def test_what_a_call_returned_that_was_aborted_is_not_taken(world):
    """Rank 2 reports rubbish after rank 0, whose part was there already, has died."""
    one = world(LIMITS, algorithm=AlgorithmSection(name="grpo", old_logprobs="recompute"))

    async def prepare():
        await one.policy.start()
        watch = asyncio.ensure_future(one.policy.watch_and_heal())
        dying, aborted, loop = one.process(0), one.process(2), asyncio.get_running_loop()
        in_time = aborted.call

        def call(name, arguments, options):
            answer = in_time(name, arguments, options)
            if name != "run_pass" or not dying.alive:
                return answer
            late = loop.create_future()
            loop.call_later(0.05, lambda: late.set_result(answer.result() - 99))
            dying.die()
            return late

        aborted.call = call
        prepared = await one.policy.prepare(BATCH)
        watch.cancel()
        return prepared.batch

    batch = run(prepare())
    assert batch.old_logprobs_R.tolist() == batch.rollout_logprobs_R.tolist()
    assert len(one.started) == 5


def test_each_rank_has_one_copy_when_ranks_came_back_on_other_nodes(world):
    one = world(LIMITS)
    one.hosts = {2: "b", 3: "b"}  # the fifth, in the place of rank 2, is on "a"

    async def train():
        await one.policy.start()
        one.process(2).dies_at = "train"
        await steps(one.policy, 1, 2)
        return [one.process(rank).states.serials.copies for rank in range(4)]

    copies = run(train())
    assert sorted(rank for of_process in copies for rank in of_process) == [0, 1, 2, 3]


def test_where_no_node_has_room_in_time_the_run_ends_and_the_process_is_asked_no_more(world):
    one = world(LIMITS, deadlines=Deadlines(placement=0.01, workers_start=0.01))

    async def train():
        await one.policy.start()
        one.no_place.add(1)
        one.process(1).dies_at = "train"
        with pytest.raises(WorkerError, match=r"rank 1.*room.*--resume"):
            await steps(one.policy, 1, 1)
        (asked, *_), *_ = one.started[4].queue
        assert asked.cancelled()

    run(train())
    assert len(one.started) == 5


def test_a_rank_that_does_not_leave_its_groups_in_time_is_replaced_as_well(world):
    one = world(LIMITS, deadlines=Deadlines(leave=0.01))

    async def train():
        await one.policy.start()
        one.process(1).dies_at, stuck = "train", one.process(0)
        answer = stuck.call
        stuck.call = lambda name, *more: asyncio.Future() if name == "leave" else answer(name, *more)
        await steps(one.policy, 1, 1)
        return one.seen

    assert run(train()) == [[0, 1]] * 4
    assert len(one.started) == 6


def test_the_limit_of_collective_calls_follows_the_deadlines(world):
    one = world(deadlines=Deadlines(collective=3600.0))
    run(one.policy.start())
    assert [process.collective_s for process in one.started] == [3600.0] * 4


def test_without_memory_for_snapshots_a_death_ends_the_run(world):
    one = world(dataclasses.replace(LIMITS, memory_gib=0.0))

    async def train():
        await one.policy.start()
        assert "trainer.snapshot_gib" in one.policy.remarks[-1]
        await steps(one.policy, 1, 1)
        assert "start_snapshot" not in one.process(0).log
        one.process(1).dies_at = "train"
        await steps(one.policy, 2, 2)

    with pytest.raises(WorkerError, match="actor rank 1 died"):
        run(train())
    assert len(one.started) == 4


def test_a_snapshot_that_fails_for_another_reason_than_a_death_ends_the_run(world):
    one = world(LIMITS)

    async def train():
        await one.policy.start()
        one.snapshots_fail = True
        await steps(one.policy, 1, 2)

    with pytest.raises(RuntimeError, match="the snapshot failed"):
        run(train())


def test_ranks_that_loaded_a_checkpoint_go_back_to_what_was_loaded(world, tmp_path):
    one, directory = world(LIMITS), tmp_path / "checkpoint"
    directory.mkdir()

    async def train():
        await one.policy.start()
        await steps(one.policy, 1, 2)
        await one.policy.save(directory, lambda: None)
        await steps(one.policy, 3, 3)
        await one.policy.load(directory)
        one.process(0).dies_at = "train"
        await steps(one.policy, 3, 3)
        return one.seen

    assert run(train()) == [[0, 1, 2, 3]] * 4
