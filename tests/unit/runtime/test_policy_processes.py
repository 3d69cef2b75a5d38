"""The policy over its processes: what each is told, whose answers count, and what becomes of a death at any call."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from rank_processes import World
from test_packing import make_batch

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import LostSaveError, LostSenderError, SyncError, WorkerError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import healing
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.slow_replicas import STEPS
from megatron_daro.sync.plan import SendFailure, SendPlan, SendReport, Target
from megatron_daro.sync.shard_tcp import Offer
from megatron_daro.types import Rollout

BATCH = make_batch([(2, 5), (1, 7), (3, 4), (2, 9)], seed=1, old=False)
TARGETS = (Target("s0", "http://b:1"), Target("s1", "http://c:1"))
PLAN = SendPlan(transport="tensor", targets=TARGETS, bucket_bytes=1 << 16, timeout_s=5.0)
LIMITS = HealingLimits(1.0, per_hour=100, hung_s=60.0)


@pytest.fixture
def world(monkeypatch, tmp_path):
    def make(limits=None, **options):
        return World(monkeypatch, tmp_path, limits=limits, **options)

    return make


@pytest.fixture
def fewer(tmp_path):
    """A rank that finds no place is not waited for."""
    return HealingLimits(1.0, per_hour=100, hung_s=60.0, fewer_after_s=0.02, folder=tmp_path / "moved")


def run(work):
    return asyncio.run(asyncio.wait_for(work, 10))


async def steps(policy, first, last):
    return [await policy.train(await policy.prepare(BATCH), step) for step in range(first, last + 1)]


@pytest.mark.parametrize("limits", [None, LIMITS, dataclasses.replace(LIMITS, fewer_after_s=5.0)])
def test_each_rank_is_told_its_number_the_layout_and_where_all_meet(world, tmp_path, limits):
    one = world(limits, logs=tmp_path / "logs", collective_timeout_s=77.0)

    async def start():
        await one.policy.start()
        ranks = [one.process(rank) for rank in range(4)]
        assert [process.rank for process in ranks] == [0, 1, 2, 3]
        wanted = f"file://{tmp_path / 'meeting_0'}/ranks", one.settings, one.actor, one.algorithm, 5, 77.0
        options = {"heals": limits is not None, "to_be_restored": False, "movable": limits not in (None, LIMITS)}
        assert [process.arguments[0] for process in ranks] == [wanted] * 4
        assert all(process.arguments[1] == options for process in ranks)
        assert one.policy.heals == (limits is not None)
        assert list(one.policy.workers) == [f"actor rank {rank}" for rank in range(4)]
        groups = [process.options["scheduling_strategy"].placement_group_bundle_index for process in ranks]
        assert groups == [0, 0, 1, 1] and {process.options["num_gpus"] for process in ranks} == {0}
        assert {process.options["logs"] for process in ranks} == {tmp_path / "logs"}
        assert one.placement._gpu_of_rank == {0: "0", 1: "1", 2: "2", 3: "3"}
        assert one.meetings[0].is_dir()
        await one.policy.close()
        await one.policy.close()
        assert not one.meetings[0].exists() and sorted(one.killed) == [0, 1, 2, 3]
        with pytest.raises(WorkerError, match="the actor's workers were not started, or have been dismissed"):
            await one.policy.offload(("weights",))

    run(start())


def test_ranks_that_were_given_a_gpu_and_see_none_are_told(world):
    one = world()

    async def remarks(gpus, device):
        one.placement._gpus, one.device = gpus, device
        await one.policy.start()
        return one.policy.remarks

    own = ["slow attention", "rank 0", "rank 1"]
    assert run(remarks(False, "cpu")) == own and run(remarks(True, "cuda")) == own
    (*same, idle) = run(remarks(True, "cpu"))
    assert same == own and idle.startswith("4 of 4 ranks (the first: rank 0) were given a GPU by Ray, but their torch")
    healed = world(LIMITS)
    run(healed.policy.start())
    assert healed.policy.remarks == [*own, healed.policy._healing.remark]


def test_columns_come_from_the_ranks_that_answer_and_stay_with_them(world):
    algorithm = AlgorithmSection(name="grpo", old_logprobs="recompute", kl={"coefficient": 0.1})
    one = world(algorithm=algorithm)

    async def train():
        await one.policy.start()
        prepared = await one.policy.prepare(BATCH)
        np.testing.assert_array_equal(prepared.old_logprobs_R, 2 * BATCH.rollout_logprobs_R)
        np.testing.assert_array_equal(prepared.ref_logprobs_R, 3 * BATCH.rollout_logprobs_R)
        result = await one.policy.train(prepared, 3)
        assert (result.step, result.metrics["loss"]) == (3, 0.75)
        assert one.puts == 2, "one shard a replica, for both passes and the step"
        for rank in range(4):
            batch, _, columns = one.process(rank).given
            np.testing.assert_array_equal(columns["old_logprobs_R"], 2 * batch.rollout_logprobs_R)
            np.testing.assert_array_equal(columns["ref_logprobs_R"], 3 * batch.rollout_logprobs_R)
        await one.policy.train(prepared, 4)
        assert one.puts == 4 and one.process(0).given[2] == {}, "once again it travels whole"
        async with one.policy.hold() as version:
            assert version == 4
        async with one.policy.hold(40) as version:
            assert version == 40
        async with one.policy.hold() as version:
            assert version == 40

    run(train())


def test_so_many_prepared_batches_are_kept_as_a_batch_has_updates(world):
    one = world(updates_per_batch=2, algorithm=AlgorithmSection(name="grpo", old_logprobs="recompute"))

    async def train():
        await one.policy.start()
        batches = [await one.policy.prepare(BATCH) for _ in range(3)]
        assert one.puts == 6
        for number, batch in enumerate(batches):
            await one.policy.train(batch, number)
        assert one.puts == 8, "of the first alone the shards were given up"

    run(train())


def test_rollout_logprobs_are_the_old_ones_where_that_is_configured(world):
    one = world(algorithm=AlgorithmSection(name="grpo", old_logprobs="rollout"))

    async def prepared():
        await one.policy.start()
        return await one.policy.prepare(BATCH)

    np.testing.assert_array_equal(run(prepared()).old_logprobs_R, BATCH.rollout_logprobs_R)
    assert one.puts == 0


def test_a_step_on_which_ranks_disagree_and_a_replica_that_is_slow_are_told(world):
    one = world()

    async def train():
        await one.policy.start()
        one.slow = (3,)
        results = await steps(one.policy, 1, STEPS)
        assert results[0].metrics["timing/slowest_replica_ratio"] == 9.0
        (warning,) = one.warnings
        assert warning.startswith(f"step {STEPS}: data-parallel replica 1 (ranks 2, 3 on a)")
        one.skips = (2,)
        with pytest.raises(WorkerError, match="ranks disagree on whether the optimizer step was applied"):
            await steps(one.policy, 11, 11)

    run(train())


def test_scores_are_of_the_rollouts_in_order(world):
    one = world()

    def rollout(length):
        tokens, logprobs = np.arange(length + 2, dtype=np.int32), -np.arange(length, dtype=np.float32)
        return Rollout("p", length, 0, 0, tokens, 2, np.ones(length, np.uint8), logprobs, "stop", 0)

    async def score(*lengths):
        await one.policy.start()
        return await one.policy.score([rollout(length) for length in lengths], temperature=0.5)

    for lengths in ((3,), (2, 5, 1)):
        found = run(score(*lengths))
        assert [column.tolist() for column in found] == [[-2.0 * i for i in range(length)] for length in lengths]


def test_memory_moves_on_all_ranks_and_the_largest_counts(world):
    one = world()

    async def move():
        await one.policy.start()
        found = await one.policy.offload(["weights"]), await one.policy.onload(["gradients", "optimizer"])
        return found, one.process(3).moved

    (away, back), last = run(move())
    assert away == back and (away.moved, away.left, away.seconds, away.others) == (3, 10, 0.75, 9)
    assert last == (("gradients", "optimizer"), False)


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
        return results[-1].metrics

    metrics = run(train())
    lost = 1 if call in ("train", "start_snapshot", "finish_snapshot") else 2
    assert len(one.started) == 4 + lost and metrics["recovery/ranks_replaced"] == (2 if call == "leave" else 1)
    assert metrics["recovery/total_s"] > 0 and metrics["recovery/steps_repeated"] <= 1
    assert metrics["recovery/replicas"] == 2 and one.policy._healing.epoch == len(one.warnings)
    names = {"restore": "rank 2", "setup": "rank 2", "leave": "rank 1, rank 2"}.get(call, "rank 1")
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


def test_fewer_replicas_go_on_and_all_train_again_when_there_is_a_place(world, fewer, tmp_path):
    one = world(fewer)

    async def train():
        await one.policy.start()
        await steps(one.policy, 1, 2)
        one.no_place.add(2)
        one.process(2).dies_at = "train"
        results = await steps(one.policy, 3, 4)
        assert results[-1].metrics["recovery/replicas"] == 1 and results[-1].metrics["recovery/ranks_replaced"] == 0
        assert list(one.policy.workers) == ["actor rank 0", "actor rank 1"] and one.seen == [[0, 1, 2, 3, 4]] * 2
        assert one.process(0).arguments[0][2].data_parallel == 1 and one.process(0).arguments[1]["movable"]
        assert one.process(0).arguments[1]["to_be_restored"]
        assert one.moved_from == [[f"rank_{rank}" for rank in range(4)]] * 2
        assert len(one.process(0).given[0]) == len(BATCH), "one replica has all of the batch"
        (warning,) = one.warnings
        assert warning.startswith("rank 2 died, and 1 found no place; 1 of 2 data-parallel replicas go on, after ")
        assert not (tmp_path / "moved").exists()
        one.no_place.clear()
        one.started[-1].go()
        await asyncio.sleep(0)
        (last,) = await steps(one.policy, 5, 5)
        assert last.metrics["recovery/replicas"] == 2 and last.metrics["recovery/ranks_replaced"] == 0
        await one.policy._healing.settle()
        assert one.seen == [[0, 1, 2, 3, 4, 5]] * 4 and one.process(2).number == 2 and len(one.started) == 5
        assert list(one.policy.workers) == [f"actor rank {rank}" for rank in range(4)]
        assert one.warnings[1].startswith("2 of 2 data-parallel replicas train again, after ")
        assert one.policy._healing.epoch == 2 and not (tmp_path / "moved").exists()
        assert one.process(3).arguments[0][2].data_parallel == 2
        one.process(0).dies_at = "train"
        await steps(one.policy, 6, 6)
        assert one.seen == [[0, 1, 2, 3, 4, 5, 6]] * 4, "snapshots count again"

    run(train())


def test_replicas_do_not_come_back_while_a_checkpoint_is_written_or_the_disk_refuses(world, fewer):
    one = world(fewer)

    async def train():
        await one.policy.start()
        one.no_place.add(2)
        one.process(2).dies_at = "train"
        await steps(one.policy, 1, 2)
        one.no_place.clear()
        one.started[-1].go()
        await asyncio.sleep(0)
        one.policy._saves = 1
        await steps(one.policy, 3, 3)
        assert len(one.policy.workers) == 2
        one.policy._saves, one.disk_is_full = 0, True
        await steps(one.policy, 4, 4)
        assert len(one.policy.workers) == 2
        assert one.warnings[-1] == (
            "1 of 2 data-parallel replicas go on, although others have a place: the disk is full"
        )
        one.disk_is_full = False
        await asyncio.sleep(0)
        await steps(one.policy, 5, 5)
        assert len(one.policy.workers) == 4 and one.seen == [[0, 1, 2, 3, 4, 5]] * 4

    run(train())


def test_a_rank_that_is_lost_while_others_come_back_is_replaced(world, fewer):
    one = world(fewer)

    async def train():
        await one.policy.start()
        one.no_place.add(2)
        one.process(2).dies_at = "train"
        await steps(one.policy, 1, 2)
        one.no_place.clear()
        one.started[-1].go()
        await asyncio.sleep(0)
        one.process(1).dies_at = "setup"
        await steps(one.policy, 3, 4)
        await one.policy._healing.settle()
        assert one.seen == [[0, 1, 2, 3, 4]] * 4 and len(one.started) == 6

    run(train())


def test_one_replica_that_is_not_whole_ends_the_run(world, fewer):
    one = world(fewer)

    async def train():
        await one.policy.start()
        one.no_place |= {0, 3}
        one.process(0).die()
        one.process(3).die()
        await steps(one.policy, 1, 1)

    with pytest.raises(WorkerError) as error:
        run(train())
    assert "actor rank 0, actor rank 3 found no place, and no data-parallel replica is whole without" in str(
        error.value
    )
    assert str(error.value).endswith(". --resume goes on from the newest checkpoint")


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
        assert captured == [2] and one.policy._saves == 0
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
    assert one.policy._saves == 0 and not list(directory.glob("torn"))


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


STAGES = ActorSection(tensor_parallel=1, pipeline_parallel=2, data_parallel=2)


def test_stages_send_one_after_the_other_and_none_after_a_failure(world):
    one = world(actor=STAGES)
    plan = dataclasses.replace(PLAN, critic=True)

    async def export():
        await one.policy.start()
        return await one.policy.export(plan)

    report = run(export())
    assert one.exported == [(0, (), True), (2, (), True)]
    assert (report.num_bytes, report.num_buckets) == (1 + 3, 2)
    one.exported.clear()
    one.report = lambda rank, plan: SendReport(failures={"s0": SendFailure("refused", "it is full")})
    assert run(export()).failures.keys() == {"s0"} and one.exported == [(0, (), True)]


def test_ranks_on_other_hosts_hand_on_what_the_sender_broadcasts(world):
    one = world(actor=ActorSection(data_parallel=3))
    one.hosts = ["a", "b", "c"]

    async def export():
        await one.policy.start()
        return [await one.policy.export(PLAN) for _ in range(2)]

    for report in run(export()):
        assert report.send_s == 2.0, "that of the slowest"
    assert one.joined == [(rank, [(0, 1, 2)]) for rank in range(3)], "once, by all"
    assert one.exported == [(0, (0, 1, 2), False)] * 2
    assert one.relayed == [(1, (0, 1, 2), ["s0"]), (2, (0, 1, 2), ["s1"])] * 2
    one.hosts = ["a", "a", "b"]
    with pytest.raises(SyncError, match="s1 on c, where no rank of the actor is"):
        run(export())


def test_shards_are_sent_by_all_ranks_at_once_and_the_first_calls_the_servers(world):
    one = world()
    one.offer = lambda rank: Offer("a", rank, "key", {(0, 0): 1}, (4,))
    plan = SendPlan(transport="shards", targets=TARGETS[:1], bucket_bytes=1, timeout_s=5.0)

    async def export():
        await one.policy.start()
        return await one.policy.export(plan)

    report = run(export())
    assert one.offered == [(0, 4), (1, 0), (2, 0), (3, 0)]
    assert (report.num_bytes, report.send_s, report.apart) == (4, 3.0, True)
    one.offer = lambda rank: Offer("a", rank, "key", {(0, 0): rank}, (4,))
    with pytest.raises(SyncError, match="the trainer's ranks offer 6"):
        run(export())
