"""What becomes of a death at any call: who is replaced, and what is repeated or ends the run."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from rank_processes import LIMITS, PLAN, run, steps

from megatron_daro.errors import LostSaveError, LostSenderError, WorkerError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import healing


def test_a_death_without_healing_ends_the_run_with_the_name(world):
    one = world()

    async def die():
        await one.policy.start()
        ended = asyncio.ensure_future(one.policy.ended())
        await asyncio.sleep(0)
        one.process(2).die()
        return await ended

    error = run(die())
    assert isinstance(error, WorkerError) and str(error).startswith("actor rank 2 died")


@pytest.mark.parametrize("call", ["train", "start_snapshot", "finish_snapshot", "restore", "setup", "adopt", "leave"])
def test_a_rank_that_dies_is_replaced_and_each_step_is_trained_once(world, call):
    one = world(LIMITS)

    async def train():
        await one.policy.start()
        await steps(one.policy, 1, 2)
        one.process(1).dies_at = call if call in ("train", "start_snapshot", "finish_snapshot") else "train"
        if call in ("restore", "setup", "leave"):
            one.process(2).dies_at = call
        if call == "adopt":
            one.next_deaths = ["adopt"]
        results = await steps(one.policy, 3, 5)
        await one.policy._healing.settle()
        assert one.seen == [[0, 1, 2, 3, 4, 5]] * 4
        assert all(one.process(rank).arguments[1]["to_be_restored"] for rank in range(4))
        return results[-1].metrics

    metrics = run(train())
    lost = 1 if call in ("train", "start_snapshot", "finish_snapshot") else 2
    assert len(one.started) == 4 + lost and metrics["recovery/ranks_replaced"] == lost
    assert metrics["recovery/total_s"] > 0 and metrics["recovery/steps_repeated"] <= 1
    assert one.policy._healing.epoch == len(one.warnings)
    names = "rank 1, rank 2" if call in ("restore", "setup", "leave") else "rank 1"
    assert one.warnings[0].startswith(f"{names} died and was replaced in ")
    assert [folder.exists() for folder in one.meetings[:-1]] == [False] * (len(one.meetings) - 1)


def test_a_death_between_two_steps_is_healed_by_the_watch_and_the_watch_goes_on(world):
    one = world(LIMITS)

    async def train():
        await one.policy.start()
        watch = asyncio.ensure_future(one.policy.ended())
        for step, rank in ((1, 0), (2, 3)):
            await steps(one.policy, step, step)
            await one.policy._healing.settle()
            one.process(rank).die()
            while len(one.warnings) < step:
                await asyncio.sleep(0)
            assert one.seen == [list(range(step + 1))] * 4
            assert all("abort" in one.process(other).log for other in range(4) if other != rank)
        assert not watch.done()
        await one.policy.close()
        await asyncio.sleep(0.01)
        assert not watch.done(), "a death that is wanted is no news"
        watch.cancel()

    run(train())
    assert "steps repeated: 0" in one.warnings[0] and one.policy._healing.epoch == 2


def test_what_cannot_be_healed_is_what_the_watch_says(world):
    one = world(dataclasses.replace(LIMITS, per_hour=0))

    async def train():
        await one.policy.start()
        watch = asyncio.ensure_future(one.policy.ended())
        await asyncio.sleep(0)
        one.process(1).die()
        return await watch

    assert "rank 1 died, and 0 ranks were replaced within the last hour; allowed: 0" in str(run(train()))


def test_replacements_of_more_than_an_hour_ago_do_not_count(world, monkeypatch):
    one, clock = world(dataclasses.replace(LIMITS, per_hour=1)), [0.0]
    clocks = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])
    monkeypatch.setattr(healing, "time", clocks)

    async def train():
        await one.policy.start()
        for now in (0.0, 3601.0):
            clock[0] = now
            one.process(1).die()
            await one.policy._healing.lost_ranks()
            await one.policy._healing.heal()
        clock[0] = 7201.0
        one.process(1).die()
        await one.policy._healing.lost_ranks()
        with pytest.raises(WorkerError, match="rank 1 died, and 1 ranks were replaced within the last hour"):
            await one.policy._healing.heal()

    run(train())


def test_a_frozen_process_is_killed_and_replaced_and_one_that_starts_is_not(world):
    one = world(dataclasses.replace(LIMITS, hung_s=0.08))

    async def train():
        await one.policy.start()
        watch = asyncio.ensure_future(one.policy.ended())
        await asyncio.sleep(0.15)
        assert one.warnings == [] and "kept" in one.process(0).log
        one.no_place.add(2)
        one.process(2).waits = True
        while len(one.started) < 5:
            await asyncio.sleep(0.01)
        assert one.warnings == ["actor rank 2 has not answered for 0.08 s: it is frozen, and is killed"]
        await asyncio.sleep(0.15)
        assert one.killed == [2, 2], "by the watch, and once more where it is replaced"
        one.started[4].go()
        while len(one.warnings) < 2:
            await asyncio.sleep(0.01)
        watch.cancel()
        await asyncio.wait([watch])

    run(train())
    assert one.seen == [[0]] * 4


def test_a_process_that_ends_as_it_starts_is_started_again_as_often_as_is_allowed(world):
    one = world(dataclasses.replace(LIMITS, per_hour=2))

    async def train():
        await one.policy.start()
        one.process(1).dies_at, one.next_deaths = "train", ["kept", "kept"]
        await steps(one.policy, 1, 1)

    with pytest.raises(WorkerError, match=r"rank 1 died, and 2 ranks were replaced within the last hour; allowed: 2"):
        run(train())
    assert len(one.started) == 6


def test_a_process_that_found_no_place_in_time_is_asked_no_more(world):
    one = world(dataclasses.replace(LIMITS, per_hour=1), deadlines=Deadlines(placement=0.01, workers_start=0.01))

    async def train():
        await one.policy.start()
        one.no_place.add(1)
        one.process(1).dies_at = "train"
        training = asyncio.ensure_future(steps(one.policy, 1, 1))
        while len(one.started) < 5 or not one.started[4]._queue:
            await asyncio.sleep(0)
        (asked, name, *_), *_ = one.started[4]._queue
        await asyncio.wait([asked])
        assert name == "kept" and asked.cancelled()
        one.started[4].die()
        with pytest.raises(WorkerError, match="rank 1 died, and 1 ranks were replaced within the last hour"):
            await training

    run(train())


def test_without_memory_for_snapshots_a_death_ends_the_run(world):
    one = world(dataclasses.replace(LIMITS, memory_gib=0.0))

    async def train():
        await one.policy.start()
        assert one.policy.remarks[-1].startswith("a lost rank ends the run, and --resume goes back to the newest check")
        await steps(one.policy, 1, 1)
        assert "start_snapshot" not in one.process(0).log and one.policy._healing._updates == []
        one.process(1).dies_at = "train"
        await steps(one.policy, 2, 2)

    with pytest.raises(WorkerError, match="actor rank 1 died"):
        run(train())
    assert len(one.started) == 4


def test_a_snapshot_that_fails_for_another_reason_than_a_death_ends_the_run(world):
    one = world(LIMITS)

    async def train():
        await one.policy.start()
        one.snapshots_wait = True
        await steps(one.policy, 1, 2)

    with pytest.raises(RuntimeError, match="the snapshot failed"):
        run(train())


def test_a_checkpoint_is_written_anew_by_the_ranks_that_took_the_place_of_the_lost(world, tmp_path):
    one, directory = world(LIMITS), tmp_path / "checkpoint"
    directory.mkdir()
    captured = []

    async def save():
        def note():
            captured.append(one.policy._version)
            (directory / "torn").mkdir()
            one.process(1).die()

        await one.policy.save(directory, note)

    async def train():
        await one.policy.start()
        await steps(one.policy, 1, 2)
        await save()
        assert captured == [2]
        assert sorted(path.name for path in directory.iterdir()) == [f"rank_{rank}" for rank in range(4)]
        await one.policy.load(directory)
        assert one.seen == [[0, 1, 2]] * 4
        one.process(0).dies_at = "train"
        await steps(one.policy, 3, 3)
        assert one.seen == [[0, 1, 2, 3]] * 4, "what was loaded has a snapshot"

    run(train())


@pytest.mark.parametrize("heals", [True, False])
def test_a_save_that_failed_is_not_repeated_with_other_weights_or_without_healing(world, tmp_path, heals):
    one, directory = world(LIMITS if heals else None), tmp_path / "checkpoint"
    directory.mkdir()

    async def train():
        await one.policy.start()
        await steps(one.policy, 1, 2)

        def note():
            one.process(1).die()
            one.policy._version += 1

        await one.policy.save(directory, note)

    says = "a rank died while step 2 was saved: " if heals else "actor rank 1 died"
    with pytest.raises(LostSaveError if heals else WorkerError, match=says):
        run(train())
    assert not list(directory.glob("torn"))


def test_a_rank_that_dies_while_weights_are_sent_is_replaced_and_the_sender_told(world):
    one = world(LIMITS)

    async def export():
        await one.policy.start()
        one.process(0).dies_at = "export"
        with pytest.raises(LostSenderError, match="the weights were not sent: actor rank 0 died"):
            await one.policy.export(PLAN)
        assert len(one.started) == 5 and one.seen == [[0]] * 4
        report = await one.policy.export(PLAN)
        assert report.num_bytes == 1

    run(export())


def test_an_export_that_fails_without_a_death_is_the_error_itself(world):
    one = world(LIMITS)
    one.report = lambda rank, plan: (_ for _ in ()).throw(WorkerError("no room"))

    async def export():
        await one.policy.start()
        await one.policy.export(PLAN)

    with pytest.raises(WorkerError, match=r"^no room$"):
        run(export())
