"""Servers on the virtual loop behind the engine Protocol: latencies, deaths, returns, weights that arrive in between.

Imitates what the loop sees of engine/sglang/: a request goes to a server that serves, waits where its server is paused
for an update and goes on with the new weights (`pause: retract`), and begins anew elsewhere when its server dies
(engine.py `_answer`); a server that was started again is "joining" until it was sent weights (update.py). Each token
is the number of the weights that really made it, so that what a rollout says of its age can be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from loop_fakes import digest

from megatron_daro.errors import LostReceiversError, SyncError
from megatron_daro.sync.plan import SendPlan
from megatron_daro.types import Rollout

FIRST_TOKEN = 10
_MOST_TOKENS = 6


class Server:
    """state: serving, updating, joining or dead. weights: the step whose weights it has. life: how often it began."""

    def __init__(self, name: str) -> None:
        self.name, self.state, self.weights, self.version, self.life, self.load = name, "joining", -1, -1, 0, 0


class Servers:
    """The engine."""

    def __init__(self, loop: Any, count: int, sent: Callable[[int], int]) -> None:
        """Args: sent: version -> the step of the weights that the ranks sent last, checked against it."""
        self.loop, self.random, self.sent = loop, loop.random, sent
        self.servers = [Server(f"server {i}") for i in range(count)]
        self.deaths, self.lost_answers, self.restarts = 0, 0, 0
        self.changed, self._closed = asyncio.Event(), False
        self._back: Any = None
        self._aborted: set[int] = set()
        self._starts: set[asyncio.Task] = set()

    async def start(self) -> None: ...

    def when_back(self, call: Any) -> None:
        self._back = call

    def notify(self) -> None:
        """Have all that wait for a server look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def die(self, number: int) -> None:
        """kill -9, whatever it does; it is started again."""
        server = self.servers[number % len(self.servers)]
        if server.state == "dead" or self._closed:
            return
        server.state, server.life, self.deaths = "dead", server.life + 1, self.deaths + 1
        self.notify()
        task = self.loop.create_task(self._restart(server))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _restart(self, server: Server) -> None:
        await asyncio.sleep(1 + 20 * self.random.random())
        server.state, server.weights, server.version, life = "joining", -1, -1, server.life
        self.restarts += 1
        self.notify()
        await self._back(server.name)
        assert server.state != "joining" or server.life != life or self._closed or server.weights == -1

    async def generate(self, requests: Any) -> Any:
        tasks = [self.loop.create_task(self._answer(request)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                if rollouts := await finished:
                    yield rollouts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, group_ids: Any = None) -> None:
        await asyncio.sleep(0.01)
        self._aborted |= set(group_ids or ())

    async def _answer(self, request: Any) -> tuple[Rollout, ...]:
        self._aborted.discard(request.group_id)
        while True:
            server = await self._free()
            life, server.load = server.life, server.load + 1
            try:
                rollouts = [await self._rollout(server, life, request, index) for index in request.indices]
            finally:
                server.load -= 1
            if None not in rollouts:
                return tuple(one for one in rollouts if one.response_length)
            self.lost_answers += 1
            await asyncio.sleep(0.1 * self.random.random())

    async def _free(self) -> Server:
        while not (serving := [one for one in self.servers if one.state == "serving"]):
            await self.changed.wait()
        return min(serving, key=lambda one: (one.load, one.name))

    async def _rollout(self, server: Server, life: int, request: Any, index: int) -> Rollout | None:
        """One sample, token by token; None: its server died."""
        earlier = request.partial.get(index)
        tokens = [] if earlier is None else earlier.tokens[earlier.prompt_length :].tolist()
        versions = [] if earlier is None else [v for v, count in earlier.version_spans for _ in range(count)]
        length = 1 + digest("length", request.group_id, index) % _MOST_TOKENS
        while len(tokens) < length and request.group_id not in self._aborted:
            await asyncio.sleep(0.02 * self.random.random())
            while server.state == "updating" and server.life == life:
                await self.changed.wait()
            if server.life != life:
                return None
            tokens.append(FIRST_TOKEN + server.weights)
            versions.append(server.version)
        return _whole(request, index, tokens, versions, "stop" if len(tokens) == length else "abort")

    def begin_update(self, version: int, only: str | None = None) -> Update | None:
        states = ("joining",) if only else ("serving", "joining")
        servers = [one for one in self.servers if one.state in states and only in (None, one.name)]
        return Update(self, servers, version, all_of_them=only is None) if servers or only is None else None

    async def close(self) -> None:
        self._closed = True
        for task in self._starts:
            task.cancel()


class Update:
    """See engine/sglang/update.py: all of it happened on a server, or the server is given up."""

    def __init__(self, engine: Servers, servers: list[Server], version: int, *, all_of_them: bool) -> None:
        self._engine, self._version, self._all = engine, version, all_of_them
        self._lives = {server: server.life for server in servers}
        for server in servers:
            server.state = "updating"

    def _left(self) -> list[Server]:
        return [one for one, life in self._lives.items() if one.state == "updating" and one.life == life]

    async def prepare(self) -> SendPlan | None:
        await asyncio.sleep(0.1 * self._engine.random.random())
        while not self._left() and self._all:
            joining = [one for one in self._engine.servers if one.state == "joining"]
            if not joining:
                await self._engine.changed.wait()
            for server in joining:
                server.state, self._lives[server] = "updating", server.life
        return SendPlan(transport="distributed", targets=(), bucket_bytes=1, timeout_s=9.0) if self._left() else None

    async def install(self, report: Any) -> None:
        weights = self._engine.sent(self._version)
        await asyncio.sleep(0.1 * self._engine.random.random())
        for server in self._left():
            server.weights, server.version = weights, self._version

    async def probe(self) -> dict:
        return {}

    async def accept(self) -> dict:
        if not (left := self._left()):
            kind = LostReceiversError if self._all else SyncError
            raise kind("no server took the weights")
        for server in left:
            server.state = "serving"
        self._engine.notify()
        return {}

    def abandon(self, error: Exception) -> None:
        for server in self._left():
            self._engine.die(self._engine.servers.index(server))


def _whole(request: Any, index: int, tokens: list[int], versions: list[int], finish: str) -> Rollout:
    prompt, spans = np.asarray(request.prompt.tokens, np.int32), list[tuple[int, int]]()
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1] = version, spans[-1][1] + 1
        else:
            spans.append((version, 1))
    text = f"{request.group_id} {index} {tokens[-1] if tokens else ''}"
    return Rollout(
        prompt_id=request.prompt.id,
        group_id=request.group_id,
        attempt=request.attempt,
        index=index,
        tokens=np.concatenate([prompt, np.asarray(tokens, np.int32)]),
        prompt_length=len(prompt),
        loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=-np.asarray(tokens, np.float32) / 100,
        finish_reason=finish,
        weight_version=min(versions, default=0),
        version_spans=tuple(spans),
        text=text,
    )
