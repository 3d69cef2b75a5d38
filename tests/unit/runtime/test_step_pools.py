"""Worker processes of environments, asked from their event loop; tests/fault/test_lost_workers.py has real nodes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.errors import RolloutError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import step_pools
from megatron_daro.runtime.step_pools import StepPools
from megatron_daro.runtime.supervisor import WorkerDiedError

PROMPT = {"id": "p", "answer": "4", "source": "s", "text": "4=", "messages": None, "category": "", "alternatives": []}
RESET = {"kind": "reset", "prompt": PROMPT}


class Workers:
    """In the place of two nodes' pools: the first call finds its pool gone. Says on which loop it was called."""

    def __init__(self, kind, make, *, warn, deadlines):
        self.calls, self.loops, self.restarts = [], set(), 0

    async def start(self, nodes):
        self.loops.add(asyncio.get_running_loop())

    async def call(self, method, request):
        self.loops.add(asyncio.get_running_loop())
        self.calls.append((method, request))
        if len(self.calls) == 1:
            raise WorkerDiedError("environment pool 0 died")
        return {"reason": "ok"}

    def close(self): ...


def elsewhere(work):
    """Await work on an event loop in a thread of its own, as environments do."""
    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(work)))
    thread.start()
    return asyncio.to_thread(lambda: (thread.join(60), found)[1])


def pools(**options):
    section = EnvironmentSection(kind="toy_steps:Steps", options=options, workers=1)
    return StepPools(section, log_folder=None, warn=print, deadlines=Deadlines())


def test_on_one_node_the_processes_are_beside_the_driver(monkeypatch):
    monkeypatch.setattr(step_pools, "alive_nodes", lambda: ["one"])

    async def scenario():
        made = pools()

        async def asked():
            await made.start()
            return await made.ask(RESET)

        (reply,) = await elsewhere(asked())
        await made.close()
        return reply

    assert asyncio.run(scenario())["step"]["state"] == ["4", "4=", 0]


def test_an_environment_that_cannot_be_made_is_said_by_name(monkeypatch):
    monkeypatch.setattr(step_pools, "alive_nodes", lambda: ["one"])

    async def scenario():
        await pools(wrong="constructor").start()

    with pytest.raises(RolloutError, match="toy_steps:Steps cannot be made"):
        asyncio.run(scenario())


def test_a_step_whose_pool_is_lost_is_done_by_another_and_ray_is_called_on_the_runs_loop(monkeypatch):
    monkeypatch.setattr(step_pools, "alive_nodes", lambda: ["one", "two"])
    monkeypatch.setattr(step_pools, "NodeWorkers", Workers)

    async def scenario():
        made = pools()

        async def asked():
            await made.start()
            return await made.ask(RESET)

        (reply,) = await elsewhere(asked())
        await made.close()
        assert made._workers.loops == {asyncio.get_running_loop()}
        return reply, made._workers.calls, made._shares

    reply, calls, shares = asyncio.run(scenario())
    assert reply == {"reason": "ok"} and calls == [("ask", RESET)] * 2 and shares == [1, 1]
