"""GPU memory that servers lend to the trainer, with `engine.colocate`.

The loop calls `release` when a batch is complete; at the next weight update each server takes memory for its weights
before they arrive, and for its cache before it serves (`resume`). SGLang asserts that it is idle when it releases
memory, and that it has released what it resumes; a failed assertion ends the server, so both are ensured here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.supervision import Supervision
from megatron_daro.errors import EngineError, RefusedError

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
"""Kinds of memory that a server can release, by SGLang's names."""
_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
_IDLE_POLL_S = 0.1


class SharedMemory:
    """The memory of all servers of a fleet."""

    def __init__(self, fleet: Fleet, supervision: Supervision, options: SGLangSection) -> None:
        """Change nothing."""
        self._fleet, self._supervision, self._options = fleet, supervision, options

    async def release(self) -> None:
        """Have every server release its memory, and return when none has any. A server that is being restarted is
        waited for; one that does not release its memory is ended, and restarted when it is the servers' turn.

        Raises:
            EngineError: no server is left.
        """
        self._supervision.hold_starts()
        await self._supervision.settled()
        await asyncio.gather(*(self._release(server) for server in self._fleet.of("serving", "suspect", "joining")))
        await self._supervision.settled()
        self._fleet.check()

    async def _release(self, server: Server) -> None:
        if server.released or not server.is_up:
            return
        self._fleet.hold_back(server)  # so it gets no requests, and the watcher no longer asks it for a token
        limit = self._options.sync_timeout_s
        try:
            await server.client.post("/pause_generation", {"mode": "abort"}, timeout_s=limit)
            await _until_idle(server, limit)
            await server.client.post("/release_memory_occupation", {"tags": list(_TAGS)}, timeout_s=limit)
        except EngineError as error:
            self._fleet.fence(server, f"giving its memory to the trainer: {error}")
            return
        server.released = frozenset(_TAGS)


async def resume(server: Server, *tags: MemoryTag, timeout_s: float) -> None:
    """Have a server take the memory of these tags that it has released. Its contents are lost, except for CUDA graphs.

    Raises:
        EngineError: it failed, and what memory it has is not known.
    """
    if away := [tag for tag in tags if tag in server.released]:
        await server.client.post("/resume_memory_occupation", {"tags": away}, timeout_s=timeout_s)
        server.released -= set(away)


async def _until_idle(server: Server, limit_s: float) -> None:
    """Abort everything on the server until it is idle, which it is when it no longer refuses to empty its cache."""
    end = time.monotonic() + limit_s
    while True:
        try:
            await server.client.post("/flush_cache", timeout_s=limit_s)
            return
        except RefusedError:
            if time.monotonic() > end:
                raise
        await server.client.post("/abort_request", {"abort_all": True}, timeout_s=limit_s)
        await asyncio.sleep(_IDLE_POLL_S)
