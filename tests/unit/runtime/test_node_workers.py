"""Starts of workers of several nodes that fail; real workers are lost in tests/fault/test_lost_workers.py."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError
from run_configuration import run_context

from megatron_daro.errors import RewardError
from megatron_daro.runtime import node_workers
from megatron_daro.runtime.node_pools import VerifierPools
from megatron_daro.runtime.node_workers import NodeWorkers
from megatron_daro.runtime.ray_calls import WorkerDiedError

NODE = "ab" * 28


def test_failed_starts_are_summed_over_the_pools_of_all_nodes(monkeypatch):
    verdicts = VerifierPools(run_context())
    said = iter([(["right"], 0, 2), (["wrong"], 1, 3), (["right"], 0, 4)])  # of a pool: since it began

    async def call(method, *pairs):
        return next(said)

    monkeypatch.setattr(verdicts.workers, "call", call)
    counts = [(asyncio.run(verdicts.score_async([("a", "b", "c")])), verdicts.failed_starts) for _ in range(3)]
    assert counts == [(["right"], 2), (["wrong"], 5), (["right"], 7)]


def test_a_worker_whose_successor_says_that_it_cannot_start_is_started_again(monkeypatch):
    monkeypatch.setattr(node_workers, "alive_nodes", lambda: [NODE])
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: None)
    starts = iter([(NODE, 1), RewardError("its verifiers were not ready within 240 s"), (NODE, 3)])
    asks = iter([ActorDiedError(), "right"])

    def in_turn(results):
        async def call():
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return result

        return SimpleNamespace(remote=call)

    def make(options, number):
        return SimpleNamespace(ready=in_turn(starts), ask=in_turn(asks))

    async def lost_and_asked_again():
        workers = NodeWorkers("verifier pool", make, run_context())
        await workers.start([NODE])
        with pytest.raises(WorkerDiedError):
            await workers.call("ask")
        async with asyncio.timeout(10):
            return await workers.call("ask"), workers.restarts

    assert asyncio.run(lost_and_asked_again()) == ("right", 2)
