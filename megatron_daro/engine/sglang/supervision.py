"""Supervision of the servers: starts them, watches their progress, restarts those that are fenced.

There is one watcher task per server process. When a server is fenced (by a watcher, a failed request or a failed weight
update), its process is ended and started again, and it returns as "joining": it gets no request until it has the
policy's weights. Progress means that a token was generated, not that a port is open; an idle server is made to generate
one.

    process -> first answer -> first token -> vetted (all: starting.py) -> joining -> (weights) -> serving
       ^                                                                                             |
       +--- process ended (and a pause, if the last start failed) <----------------------- fenced <--+
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from megatron_daro.backoff import backoff_s
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.servers import ServerHandle
from megatron_daro.engine.sglang.starting import bring_up
from megatron_daro.engine.sglang.vetting import Expected, UnusableServerError
from megatron_daro.errors import DaroError, EngineError

_WATCH_S = 2.0
_CLOSE_S = 10.0
_RESTART_PAUSE_S = 1.0
_LONGEST_RESTART_PAUSE_S = 60.0
# How long a process may take to be seen as gone after its connections broke.
_DEATH_S, _DEATH_POLL_S = 3.0, 0.1
_SETTLE_POLL_S = 0.05


class Supervision:
    """Life and death of the servers of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        handles: Mapping[str, ServerHandle],
        options: SGLangSection,
        expected: Expected,
        *,
        warn: Callable[[str], None],
        loads: Callable[[str], None] = lambda text: None,
        join: Callable[[Server], Awaitable[None]],
    ) -> None:
        """Args: handles: by server name. join: gives a server the policy's weights (or leaves that to the next
        update). warn: shows the user a warning. loads: shows the user which server loads."""
        self._loads = loads
        self._fleet, self._handles, self._options, self._expected = fleet, handles, options, expected
        self._warn, self._join = warn, join
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._may_start = asyncio.Event()  # cleared while the trainer has the GPUs
        self._may_start.set()
        self._unsettled: set[str] = set()  # servers whose process is being ended or started

    async def start(self) -> None:
        """Start all servers at once and watch them from then on. A server that fails to start is restarted while the
        others go on.

        Raises:
            EngineError: none started; or one failed and may not be restarted (it was started by somebody else, shares
                the trainer's GPUs, or max_restarts is 0); or one is not what the run needs (UnusableServerError).
        """
        starting = [asyncio.create_task(self._start(server)) for server in self._fleet.servers]
        for task in starting:
            task.add_done_callback(lambda _: self._say_what_loads(starting))
        self._say_what_loads(starting)
        try:
            failures = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            raise
        if all(failures):
            raise EngineError(str(failures[0]))
        for server, failure in zip(self._fleet.servers, failures, strict=True):
            if failure:
                self._fleet.fence(server, str(failure))
            else:
                self._run(self._watch(server))

    def _say_what_loads(self, starting: Sequence[asyncio.Task[EngineError | None]]) -> None:
        """Show how far the start is, as if the servers came up one after another."""
        ended = sum(task.done() for task in starting)
        if ended < len(starting):
            self._loads(f"server {ended + 1} of {len(starting)} loads")

    async def _start(self, server: Server) -> EngineError | None:
        """Bring a server up for the first time. Returns None, or why it must be restarted; raises if it may not be."""
        try:
            await self._bring_up(server)
        except UnusableServerError:
            raise
        except EngineError as error:
            again = self._handles[server.name].restartable and self._options.max_restarts
            if not again or self._expected.shares_gpus:
                raise
            return error
        return None

    def restart(self, server: Server) -> None:
        """Restart a fenced server, in the background."""
        if self._closing:
            return
        self._warn(f"SGLang {server.name} is given up: {server.reason}")
        self._unsettled.add(server.name)
        self._run(self._restart(server))

    def hold_starts(self) -> None:
        """Restart no process until `allow_starts`: the trainer gets the GPUs."""
        self._may_start.clear()

    def allow_starts(self) -> None:
        """Let restarts go on that waited since `hold_starts`."""
        self._may_start.set()

    async def settled(self) -> None:
        """Wait until no process is being ended or started."""
        while self._unsettled and not self._closing:
            await asyncio.sleep(_SETTLE_POLL_S)

    async def close(self) -> None:
        """Stop watching and end every process of ours. May be called twice."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        await asyncio.gather(*(handle.stop() for handle in self._handles.values()), return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self._fleet.servers))

    async def examine(self, server: Server) -> None:
        """Fence the server now if its process is gone."""
        reason = await self._handles[server.name].death()
        if reason and server.is_up:
            self._fleet.fence(server, reason)

    def give_up(self, server: Server, reason: str) -> None:
        """Fence a server whose requests fail. If its process turns out to be gone, that is the reason given: its log
        says more than a broken connection. It is suspect meanwhile, since the end of all its children takes a moment.
        """
        if self._handles[server.name].restartable:
            self._fleet.suspect(server)
            self._run(self._give_up(server, reason))
        else:
            self._fleet.fence(server, reason)

    async def _give_up(self, server: Server, reason: str) -> None:
        death = await self.death_of(server)
        if server.state == "suspect":
            self._fleet.fence(server, death or reason)

    async def death_of(self, server: Server) -> str:
        """Return why the process of a server that cannot be reached is gone, waiting a moment for its end to show;
        empty if it lives, or if that is not known."""
        handle = self._handles[server.name]
        end = time.monotonic() + _DEATH_S
        while not (reason := await handle.death()) and handle.restartable and time.monotonic() < end:
            await asyncio.sleep(_DEATH_POLL_S)
        return reason

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the fleet if a supervising task failed: the run must not go on unwatched."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            said = (
                str(error) if isinstance(error, DaroError) else f"supervision of the SGLang servers failed: {error!r}"
            )
            self._fleet.fail(EngineError(said))

    async def _bring_up(self, server: Server) -> None:
        """Start a server's process and wait until it is ready for weights. Raises as `bring_up`."""
        await bring_up(server, self._handles[server.name], self._options, self._expected, self._warn)
        self._fleet.hold_back(server)

    async def _watch(self, server: Server) -> None:
        """Check every few seconds that the process lives and tokens are generated; fence the server if not."""
        limit = self._options.stall_timeout_s
        while server.state != "fenced":
            await asyncio.sleep(min(_WATCH_S, limit / 4))
            if server.state not in ("serving", "joining"):
                continue
            await self.examine(server)
            silent = time.monotonic() - server.last_progress
            if server.state != "serving" or silent < limit / 2:
                continue
            if await server.client.healthy(timeout_s=max(limit - silent, 1.0)):
                server.progressed()
            elif server.state == "serving":
                self._fleet.fence(server, f"no token came out of it for {limit:g} s (engine.sglang.stall_timeout_s)")

    async def _restart(self, server: Server) -> None:
        """End the rest of the process and start another, until one is up or the restarts are used up."""
        given_up_for, failed_starts = server.reason, 0
        await self._end_process(server)
        while True:
            await self._may_start.wait()
            if server.restarts >= self._options.max_restarts:
                self._warn(
                    f"SGLang {server.name} stays away: engine.sglang.max_restarts is {self._options.max_restarts}"
                )
                return
            before, server = server, self._fleet.start_again(server)
            self._unsettled.add(server.name)
            await before.client.close()
            try:
                await self._bring_up(server)
                self._unsettled.discard(server.name)
                break
            except EngineError as error:
                self._warn(f"SGLang {server.name} did not come back: {error}")
                self._fleet.start_failed(server, f"{given_up_for}; then it did not come back: {error}")
            await self._end_process(server)
            await asyncio.sleep(backoff_s(failed_starts, first_s=_RESTART_PAUSE_S, longest_s=_LONGEST_RESTART_PAUSE_S))
            failed_starts += 1
        self._run(self._watch(server))
        await self._join(server)

    async def _end_process(self, server: Server) -> None:
        await self._handles[server.name].stop()
        self._unsettled.discard(server.name)
