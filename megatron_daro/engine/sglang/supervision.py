"""Supervision of the servers: starts them, watches their progress, restarts those that are fenced.

One watcher per server, beside the engine. When a server is fenced (by a watcher, a failed request or a failed weight
update), its process is ended and started again, and it returns as "joining": it gets no request until it has the
policy's weights. Progress means that a token came out, not that a port is open; an idle server is asked for one.

    launch -> first answer -> first token -> vetted (vetting.py) -> joining -> (weights) -> serving
       ^                                                                                      |
       +--- restart pause, process ended <------------------ fenced <-------------------------+
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_daro.backoff import backoff_s
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import vetting
from megatron_daro.engine.sglang.client import DisconnectedError, ServerFacts, SGLangClient, UnreachableError
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.servers import ServerHandle
from megatron_daro.engine.sglang.vetting import Expected, UnusableServerError, still_starts, unusable
from megatron_daro.errors import EngineError, RefusedError

_POLL_S = 0.5
_SAY_S = 30.0
_WATCH_S = 2.0
_CALL_S = 10.0
_FIRST_TOKEN_S = 60.0
_RESTART_PAUSE_S = 1.0
_LONGEST_RESTART_PAUSE_S = 60.0
# So many starts in a row after which a server served nobody, and the run waits for it no longer.
_UNSERVED_STARTS = 3
# How long a process may take to be seen as gone after its connections broke.
_DEATH_S, _DEATH_POLL_S = 3.0, 0.1
_SETTLE_POLL_S = 0.05


@dataclass(slots=True)
class _Wait:
    """A wait for a server that does not generate yet; a person is told now and then what keeps it from that."""

    server: str
    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    next_s: float = field(default_factory=lambda: _SAY_S)
    reason: str = "no answer yet"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def go_on(self, error: EngineError) -> None:
        """Note why it is not there yet."""
        self.reason = str(error)
        if self.seconds >= self.next_s:
            self.next_s = 2 * self.next_s
            self.tell(f"waiting for {self.server} for {self.seconds:.0f} s: {error}")


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
        update). warn: tells a person. loads: tells a person which server loads."""
        self._loads = loads
        self._fleet, self._handles, self._options, self._expected = fleet, handles, options, expected
        self._warn, self._join = warn, join
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._may_start = asyncio.Event()  # cleared while others have the GPUs
        self._may_start.set()
        self._unsettled: set[str] = set()  # servers whose process is being ended or started

    async def start(self) -> None:
        """Start all servers at once and watch them from then on. One whose process fails is started again beside the
        others.

        Raises:
            EngineError: none started, or one cannot be used: one that runs already, one with another model or without
                what the run needs, one that shares its GPUs with the trainer.
        """
        starting = [asyncio.create_task(self._start(server)) for server in self._fleet.servers]
        for task in starting:
            task.add_done_callback(lambda _: self._tell(starting))
        self._tell(starting)
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
        for server in self._fleet.servers:
            self._run(self._watch(server))

    def _tell(self, starting: Sequence[asyncio.Task[EngineError | None]]) -> None:
        """Say which server is loading: the first that is still to come."""
        ended = sum(task.done() for task in starting)
        if ended < len(starting):
            self._loads(f"server {ended + 1} of {len(starting)} loads")

    async def _start(self, server: Server) -> EngineError | None:
        """Bring a server up for the first time; returns why it must be started again."""
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

    def revive(self, server: Server) -> None:
        """Brings a fenced server back, in the background."""
        if self._closing:
            return
        self._warn(f"SGLang {server.name} is given up: {server.reason}")
        server.is_awaited = self._may_be_awaited(server)
        self._unsettled.add(server.name)
        self._run(self._revive(server))

    def hold_starts(self) -> None:
        """Start no process again from now on, until `allow_starts`: others have the GPUs."""
        self._may_start.clear()

    def allow_starts(self) -> None:
        """Start those again that waited for it."""
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
            await asyncio.wait(self._tasks, timeout=_CALL_S)
        await asyncio.gather(*(handle.stop() for handle in self._handles.values()), return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self._fleet.servers))

    async def examine(self, server: Server) -> None:
        """Fences the server now if its process is gone."""
        reason = await self._handles[server.name].death()
        if reason and server.state in ("serving", "updating", "joining"):
            self._fleet.fence(server, reason)

    def give_up(self, server: Server, reason: str) -> None:
        """Fences a server whose requests fail. If its process turns out to be gone that is the reason: its log says
        more than a connection that broke; but the end of all its children takes a moment."""
        if self._handles[server.name].restartable:
            self._fleet.set_state(server, "joining")  # it gets no request meanwhile
            self._run(self._give_up(server, reason))
        else:
            self._fleet.fence(server, reason)

    async def _give_up(self, server: Server, reason: str) -> None:
        death = await self.death_of(server)
        if server.state == "joining":
            self._fleet.fence(server, death or reason)

    async def death_of(self, server: Server) -> str:
        """Why the process of a server that cannot be reached is gone, which may take a moment to be seen; empty where
        it lives, and where nobody knows."""
        handle = self._handles[server.name]
        end = time.monotonic() + _DEATH_S
        while not (reason := await handle.death()) and handle.restartable and time.monotonic() < end:
            await asyncio.sleep(_DEATH_POLL_S)
        return reason

    def _may_be_awaited(self, server: Server) -> bool:
        """Whether the run may go on without any other server until this one is back. Not where it waits for the
        trainer to leave the GPUs, nor where it never served: what kept it from that will be there again."""
        return (
            server.has_served
            and self._handles[server.name].restartable
            and not self._expected.shares_gpus
            and server.restarts < self._options.max_restarts
            and server.unserved_starts < _UNSERVED_STARTS
        )

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the fleet where a watcher failed: the run must not go on unwatched."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fleet.fail(EngineError(f"supervision of the SGLang servers failed: {task.exception()!r}"))

    async def _bring_up(self, server: Server) -> None:
        """Process, first answer, first token, and whether it is what it must be. Leaves it "joining"."""
        handle = self._handles[server.name]
        server.unserved_starts += 1
        url = await handle.launch()
        await server.client.close()
        server.client = SGLangClient(url)
        server.versions, server.version, server.released = set(), None, frozenset()
        wait = _Wait(f"{server.name} at {url}", self._warn)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                server.facts = await self._first_answer(server, handle, wait)
                if not handle.restartable:
                    await self._wake(server)
                await self._first_token(server, handle, wait)
        except TimeoutError:
            raise EngineError(
                f"{wait.server} did not generate within {wait.seconds:.0f} s ({wait.reason}); raise "
                "engine.sglang.start_timeout_s if it is only slow"
            ) from None
        await self._vet(server)
        server.reason = ""
        self._fleet.set_state(server, "joining")

    async def _first_answer(self, server: Server, handle: ServerHandle, wait: _Wait) -> ServerFacts:
        while True:
            try:
                return await server.client.facts(timeout_s=_CALL_S)
            except UnreachableError as error:
                reason = await handle.death()
                if reason:
                    raise EngineError(f"{server.name} did not start: {reason}") from None
                if not handle.restartable and not still_starts(error):
                    raise unusable(server.url, error) from None
                wait.go_on(error)
            except RefusedError as error:
                raise unusable(server.url, error) from None
            await asyncio.sleep(_POLL_S)

    async def _wake(self, server: Server) -> None:
        """Wake a server that ran before this run and may still be paused: its last weight update failed, or was never
        ended."""
        with contextlib.suppress(EngineError):  # what it lacks is said below, what hangs shows at the first token
            await server.client.post("/continue_generation", timeout_s=_CALL_S)

    async def _first_token(self, server: Server, handle: ServerHandle, wait: _Wait) -> None:
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        while True:
            try:
                await server.client.post("/generate", body, timeout_s=_FIRST_TOKEN_S)
                return
            except UnreachableError as error:
                reason = await handle.death()
                if reason:
                    raise EngineError(f"{server.name} did not start: {reason}") from None
                is_gone = isinstance(error, DisconnectedError) and not handle.restartable
                if is_gone or (error.status and not still_starts(error)):
                    raise EngineError(
                        f"{wait.server} cannot generate a token ({error}); allowed: a server that answers /generate; "
                        "look at its log"
                    ) from None
                wait.go_on(error)
            await asyncio.sleep(_POLL_S)

    async def _vet(self, server: Server) -> None:
        """Raise UnusableServerError where the server cannot do what the run needs, with all reasons at once."""
        assert server.facts is not None
        problems = vetting.problems(
            await vetting.report_of(server.client, server.facts, self._expected), self._expected, self._options
        )
        if problems:
            field_name = "engine.sglang" if self._handles[server.name].restartable else "engine.sglang.urls"
            message = f"{field_name}: {server.name} at {server.url} cannot be used: " + "; ".join(problems)
            raise UnusableServerError(message)
        if note := vetting.untested(server.facts):
            self._warn(f"{server.name} is {note}")

    async def _watch(self, server: Server) -> None:
        """Look every few seconds whether the process lives and whether tokens come."""
        limit = self._options.stall_timeout_s
        while True:
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

    async def _revive(self, server: Server) -> None:
        """End what is left of the process and start another, until one is up or the restarts are used up."""
        given_up_for, failed_starts = server.reason, 0
        await self._end_process(server)
        while True:
            await self._may_start.wait()
            if server.restarts >= self._options.max_restarts:
                self._warn(f"SGLang {server.name} was started {server.restarts} times again and stays away")
                return
            server.restarts += 1
            self._fleet.set_state(server, "starting")
            self._unsettled.add(server.name)
            try:
                await self._bring_up(server)
                self._unsettled.discard(server.name)
                break
            except EngineError as error:
                server.reason = f"{given_up_for}; then it could not be started again: {error}"
                self._warn(f"SGLang {server.name} could not be started again: {error}")
                server.is_awaited = self._may_be_awaited(server)
                self._fleet.end_if_all_gone()
            await self._end_process(server)
            await asyncio.sleep(backoff_s(failed_starts, first_s=_RESTART_PAUSE_S, longest_s=_LONGEST_RESTART_PAUSE_S))
            failed_starts += 1
        await self._join(server)

    async def _end_process(self, server: Server) -> None:
        await self._handles[server.name].stop()
        self._unsettled.discard(server.name)
