"""The policy over its processes: what each is told, whose answers count, and what becomes of a death at any call."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rank_processes import BATCH, LIMITS, PLAN, TARGETS, run, steps

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import SyncError, WorkerError
from megatron_daro.runtime.slow_replicas import STEPS
from megatron_daro.sync.plan import SendFailure, SendPlan, SendReport
from megatron_daro.sync.shard_tcp import Offer
from megatron_daro.types import Rollout


@pytest.mark.parametrize("limits", [None, LIMITS])
def test_each_rank_is_told_its_number_the_layout_and_where_all_meet(world, tmp_path, limits):
    one = world(limits, logs=tmp_path / "logs", collective_timeout_s=77.0)

    async def start():
        await one.policy.start()
        ranks = [one.process(rank) for rank in range(4)]
        assert [process.rank for process in ranks] == [0, 1, 2, 3]
        wanted = f"file://{tmp_path / 'meeting_0'}/ranks", one.settings, one.actor, one.algorithm, 5, 77.0
        options = {"heals": limits is not None, "to_be_restored": False}
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
