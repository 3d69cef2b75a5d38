"""Engines of stub servers, and somebody who has weights for them: what the unit tests of this folder share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
from sglang_pool import engine_of, section, started
from stub_server import StubServer, times

from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.plan import SendFailure, SendReport
from megatron_daro.sync.publish import WeightSync

LIMIT_S = 60


def run(coroutine):
    """Nothing here may wait for ever."""
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


class Weights:
    """A WeightExporter that calls servers as the policy's ranks do, and takes the stub's log-probs for right.

    plans, directories: what it was asked for. digests: those it claims to have sent. broken: raised by an export.
    """

    def __init__(self, version=1):
        self.version, self.plans, self.directories = version, [], []
        self.digests, self.broken = {}, None

    @asynccontextmanager
    async def hold(self):
        yield

    async def export(self, plan):
        if self.broken:
            raise self.broken
        self.plans.append(plan)
        path = f"/update_weights_from_{plan.transport}"
        failures = {}
        for target in plan.targets:
            try:
                async with SGLangClient(target.url) as client:
                    await client.post(path, {"names": ["w"]}, timeout_s=plan.timeout_s)
            except EngineError as error:
                kind = "refused" if isinstance(error, RefusedError) else "unanswered"
                failures[target.name] = SendFailure(kind, str(error))
        return SendReport(100, 0.5, self.digests if plan.digest_dtype else {}, failures=failures)

    async def write(self, files):
        if self.broken:
            raise self.broken
        files.directory.mkdir(parents=True)
        (files.directory / "model").write_text("weights")
        self.plans.append(files)
        self.directories.append(files.directory)
        return SendReport(100, 0.5)

    async def logprobs_of(self, rollouts, *, temperature):
        return [-0.5 - 0.01 * np.arange(r.response_length, dtype=np.float32) for r in rollouts]


class Rig:
    """A started engine of stubs with their handles (or URLs), and what it told people."""

    def __init__(self, engine, stubs, handles, warnings):
        self.engine, self.stubs, self.handles, self.warnings = engine, stubs, handles, warnings
        self.servers = engine.fleet.servers
        self._syncs = {}

    async def publish(self, weights, version):
        """What the controller does; every Weights has a WeightSync of its own."""
        if weights not in self._syncs:
            self._syncs[weights] = WeightSync(weights, self.engine)
        return await self._syncs[weights].publish(version)

    @property
    def states(self):
        return [server.state for server in self.servers]

    async def until(self, condition):
        """Looks until it holds; `run` limits the wait."""
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def rig(
    tmp_path, *stubs, count=2, handles=None, decode=None, answers=None, expect=None, updated=None, seed=0, **options
):
    """A started engine. stubs: options of each, or `count` plain ones. handles: made of the stubs' URLs.
    updated: the Weights that it has from the beginning. Servers that fail stay away unless max_restarts is given."""
    warnings = []
    async with AsyncExitStack() as stack:
        up = [await stack.enter_async_context(StubServer(**given)) for given in (stubs or [{}] * count)]
        servers = [stub.url for stub in up] if handles is None else [handles(stub.url) for stub in up]
        engine = engine_of(
            servers, tmp_path, options=section(**{"max_restarts": 0, **options}), warnings=warnings, decode=decode,
            answers=answers, expect=expect, seed=seed,
        )  # fmt: skip
        await stack.enter_async_context(started(engine))
        fleet = Rig(engine, up, servers, warnings)
        if updated:
            await fleet.publish(updated, updated.version)
        for stub in up:
            for heard in (stub.order, stub.bodies, stub.calls, stub.said):
                heard.clear()
        yield fleet


class StubHandle:
    """A stub as a server that the engine starts: a test says when it is dead, and how often starting it fails."""

    restartable = True

    def __init__(self, url):
        self.url, self.dead, self.failing = url, "", 0
        self.launches = self.stops = 0

    async def launch(self):
        self.launches += 1
        if self.failing:
            self.failing -= 1
            raise EngineError("no GPU is free")
        self.dead = ""
        return self.url

    async def death(self):
        if isinstance(self.dead, Exception):
            raise self.dead
        return self.dead

    async def stop(self):
        self.stops += 1


def first(stub, count, answer):
    """The stub's /generate answers so `count` times, afterwards as always."""
    stub.answers["/generate"] = times(count, answer, stub.generate)


def serving(tmp_path, *stubs, **options):
    """A `rig` whose servers have the weights of an update."""
    return rig(tmp_path, *stubs, **{"updated": Weights(), **options})
