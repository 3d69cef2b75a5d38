"""What a run is told by its ranks: log-probs in the order of the rollouts, and what a person should know."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from rank_processes import BATCH, run, steps

from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.runtime import step_shards
from megatron_daro.runtime.slow_replicas import STEPS
from megatron_daro.types import Rollout


@pytest.mark.parametrize("lengths", [(3,), (2, 5, 1)], ids=["fewer than replicas", "more"])
def test_scores_are_of_the_rollouts_in_order(world, lengths):
    one = world()

    def rollout(length):
        tokens, logprobs = np.arange(length + 2, dtype=np.int32), -np.arange(length, dtype=np.float32)
        return Rollout("p", length, 0, 0, tokens, 2, np.ones(length, np.uint8), logprobs, "stop", 0)

    async def score():
        await one.policy.start()
        return await one.policy.logprobs_of([rollout(length) for length in lengths], temperature=0.5)

    assert [column.tolist() for column in run(score())] == [[-2.0 * i for i in range(length)] for length in lengths]


def test_shards_of_steps_that_nobody_trains_go_with_the_next_batch(world, monkeypatch):
    one, put = world(algorithm=AlgorithmSection(name="grpo", old_logprobs="recompute")), []
    monkeypatch.setattr(step_shards.ray, "put", lambda shard: put.append(weakref.ref(shard.tokens_T)) or shard)

    def held():
        gc.collect()
        return sum(tokens() is not None for tokens in put)

    async def work():
        await one.policy.start()
        dropped = [await one.policy.prepare(replace(BATCH, opens_batch=first)) for first in (True, False)]
        counts = [held()]
        prepared = await one.policy.prepare(BATCH)
        counts.append(held())
        await one.policy.train(prepared, 1)
        return len(dropped), [*counts, held()]

    assert run(work()) == (2, [4, 2, 0]), "of two replicas each"


@pytest.mark.parametrize(
    ("has_gpus", "device", "warned"), [(False, "cpu", False), (True, "cuda", False), (True, "cpu", True)]
)
def test_ranks_that_were_given_a_gpu_and_see_none_are_told(world, has_gpus, device, warned):
    one = world(has_gpus=has_gpus)
    one.device = device
    run(one.policy.start())
    own = ["slow attention", "rank 0", "rank 1"]
    assert one.policy.remarks[:3] == own and len(one.policy.remarks) == 3 + warned
    assert not warned or "4 of 4 ranks" in one.policy.remarks[3]


def test_a_replica_that_stays_slow_is_named(world):
    one = world()

    async def train():
        await one.policy.start()
        one.slow = (3,)
        return await steps(one.policy, 1, STEPS)

    assert run(train())[0].metrics["timing/slowest_replica_ratio"] == 9.0
    (warning,) = one.warnings
    assert "replica 1" in warning and "ranks 2, 3" in warning
