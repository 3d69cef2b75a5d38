"""Groups that servers are generating: what has come of each, and which server has the beginning of the next turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megatron_daro.engine.sglang.fleet import Server
from megatron_daro.rollout.environment import TURN
from megatron_daro.types import GroupRequest, Rollout

_MOST_CONVERSATIONS = 50_000
_Result = TypeVar("_Result")


@dataclass(eq=False)
class RunningGroup:
    """A group that is being generated.

    stop: nothing more of it is wanted. ids: what the server calls the samples that it works on. failed_on: the last
    server that failed. done and partial: by index.
    """

    request: GroupRequest
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ids: tuple[str, ...] = ()
    server: Server | None = None
    failed_on: Server | None = None
    done: dict[int, Rollout] = field(default_factory=dict)
    partial: dict[int, Rollout] = field(default_factory=dict)

    def remaining(self) -> GroupRequest:
        """Return what is still to be asked for."""
        indices = tuple(i for i in self.request.indices if i not in self.done)
        return replace(self.request, indices=indices, partial={i: r for i, r in self.partial.items() if i in indices})

    def take(self, rollouts: Sequence[Rollout]) -> bool:
        """Keep what came; whether anything of it is new."""
        before = sum(r.response_length for r in self.partial.values()), len(self.done)
        for rollout in rollouts:
            if rollout.finish_reason != "abort":
                self.done[rollout.index] = rollout
            elif rollout.response_length:
                self.partial[rollout.index] = rollout
        return (sum(r.response_length for r in self.partial.values()), len(self.done)) != before

    def collected(self) -> tuple[Rollout, ...]:
        """Return what there is: finished rollouts, and for the others what they got to."""
        cut = {i: r for i, r in self.partial.items() if r is not self.request.partial.get(i)}
        by_index = cut | self.done
        return tuple(by_index[i] for i in self.request.indices if i in by_index)


class LastServers:
    """Which server answered the last turn of a conversation: the next one finds its tokens in that server's cache."""

    def __init__(self) -> None:
        self._servers: OrderedDict[tuple[int, int, int], Server] = OrderedDict()

    def of(self, request: GroupRequest) -> Server | None:
        """Look the server up; None for a first turn."""
        return self._servers.get(self._key(request)) if request.attempt >= TURN else None

    def note(self, request: GroupRequest, server: Server) -> None:
        """Remember who answered; the oldest of very many are forgotten. A group that is asked for at once has no more
        turns."""
        if len(request.indices) > 1:
            return
        self._servers[self._key(request)] = server
        self._servers.move_to_end(self._key(request))
        if len(self._servers) > _MOST_CONVERSATIONS:
            self._servers.popitem(last=False)

    @staticmethod
    def _key(request: GroupRequest) -> tuple[int, int, int]:
        return request.group_id, request.attempt % TURN, request.indices[0]


async def until_stopped(work: Awaitable[_Result], stop: asyncio.Event) -> _Result | None:
    """Return the result of `work`, or None when `stop` comes first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
