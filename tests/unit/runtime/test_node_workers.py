"""Calls to workers that are spread over nodes: what a burst of them does to the event loop, and what verifiers say of
their starts. Workers are faked here; tests/fault/test_lost_workers.py has real ones, and loses them."""

import asyncio

from megatron_daro.config.sections import RewardSection
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime.node_workers import NodeWorkers, Verdicts


class Handle:
    """An actor whose calls end a little later; counts the turns of the event loop between two calls."""

    def __init__(self):
        self.turn, self.turns = 0, []
        self.ready = self.work = self

    def remote(self, *arguments):
        self.turns.append(self.turn)
        return asyncio.sleep(0.01, arguments)


def test_between_two_calls_of_a_burst_the_event_loop_turns(monkeypatch):
    handle = Handle()
    workers = NodeWorkers("worker", lambda options, number: handle, warn=print, deadlines=Deadlines())

    async def count():
        while True:
            handle.turn += 1
            await asyncio.sleep(0)

    async def scenario():
        monkeypatch.setattr(workers, "_place", lambda slot: setattr(slot, "handle", handle))
        await workers.start(["node"])
        handle.turns.clear()
        counting = asyncio.create_task(count())
        results = await asyncio.gather(*(workers.call("work", i) for i in range(50)))
        counting.cancel()
        return results

    assert asyncio.run(scenario()) == [(i,) for i in range(50)]
    assert len(set(handle.turns)) == 50


def test_failed_starts_are_summed_over_the_pools_of_all_nodes(monkeypatch):
    verdicts = Verdicts(RewardSection(), beside_driver=False, warn=print, deadlines=Deadlines())
    said = iter([(["right"], 0, 2), (["wrong"], 1, 3), (["right"], 0, 4)])  # of a pool: since it began

    async def call(method, *pairs):
        return next(said)

    monkeypatch.setattr(verdicts.workers, "call", call)
    counts = [(asyncio.run(verdicts.score_async([("a", "b", "c")])), verdicts.failed_starts) for _ in range(3)]
    assert counts == [(["right"], 2), (["wrong"], 5), (["right"], 7)]
