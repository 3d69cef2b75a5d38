"""The servers of a run: which one gets the next request, which one is given up, and whether any is left.

generation.py acquires a server for each request and releases it. Only serving servers are handed out, and all waits end
with an error when no server is left. A server's state changes only in these methods:

    hold_back      starting; serving, suspect, joining  -> joining
    begin_update   serving, joining                     -> updating
    serve          updating; as loaded also joining     -> serving
    suspect        serving                              -> suspect
    fence          any                                  -> fenced, for ever
    start_failed   starting                             -> fenced, for ever
    start_again    fenced                               -> replaced by a new Server: starting
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_daro.deadlines import STARTS
from megatron_daro.engine.sglang.client import ServerFacts, SGLangClient
from megatron_daro.errors import DeadlineError, EngineError

State = Literal["starting", "joining", "serving", "updating", "suspect", "fenced"]
"""starting: its process loads; joining: it answers, and lacks the policy's weights or has given its memory to the
trainer; serving: it gets requests; updating: its weights change; suspect: its requests fail, and the cause is being
looked for; fenced: given up."""

# Before any answer has come, answers are estimated at this part of the limit.
_FIRST_GUESS = 0.25
# Weight of a new length in the running mean of answer lengths, which so reflects the last few dozen answers.
_MEMORY = 0.05
# Estimates are this many times the mean: it is the longer answers that fill a server.
_MARGIN = 1.5
# A server is given up when so many requests failed with no success between, over at least so many seconds: a moment in
# which all requests in flight fail at once is no reason to restart it.
_FAILURES_IN_A_ROW, _FAILING_S = 5, 3.0


@dataclass(eq=False)
class Server:
    """One process of a server and what is known of it. The next process is another object (`start_again`), so a task
    that still holds this one cannot change the state of the next. Only the fleet changes `state`; other fields are set
    where they are learned.

    facts: known once it has answered. version: of its weights while it serves. versions: all that it was given
    (receiving.py). adapter: if versions are adapters, the one that new requests name; adapters: each one that it has ->
    number of requests in flight that name it (receiving.py, generation.py). released: memory that it gave back, by
    SGLang's names (memory.py); a joining server lacks weights, memory or both. failures: in a row.

    These carry over from the processes before it. restarts: how many there were. awaited_restarts: for how many the run
    waits at most. served_at: the value of `restarts` when one last served. reason: why the last one was given up, or
    how the last send to it failed.
    """

    name: str
    client: SGLangClient = field(default_factory=lambda: SGLangClient("http://not-started"))
    facts: ServerFacts | None = None
    state: State = "starting"
    version: int | None = None
    versions: set[int] = field(default_factory=set)
    adapter: str = ""
    adapters: Counter[str] = field(default_factory=Counter)
    released: frozenset[str] = frozenset()
    tokens_in_flight: int = 0
    last_progress: float = field(default_factory=time.monotonic)
    failures: int = 0
    failing_since: float = 0.0
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: int = 0
    awaited_restarts: int = 0
    served_at: int | None = None
    reason: str = ""

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url

    @property
    def is_up(self) -> bool:
        """Whether it is expected to answer."""
        return self.state not in ("starting", "fenced")

    @property
    def is_awaited(self) -> bool:
        """Whether it may serve again by itself, so that the run waits for it if no other server is left.

        A server that is joining or suspect is awaited. One that is fenced or starting is awaited only if it has served
        before (otherwise what kept it from serving would do so again), for three starts since it last served, and
        within `max_restarts`; never if somebody else would have to start it, or if the trainer would have to leave its
        GPUs first (`awaited_restarts` is 0).
        """
        if self.is_up or self.served_at is None:
            return self.state in ("joining", "suspect")
        start = self.restarts + (self.state == "fenced")  # the present start, or the next one
        return start <= min(self.awaited_restarts, self.served_at + STARTS)

    def failed(self) -> bool:
        """Note that a request to it failed. Returns whether that is enough to give it up."""
        now = time.monotonic()
        if not self.failures:
            self.failing_since = now
        self.failures += 1
        return self.failures >= _FAILURES_IN_A_ROW and now - self.failing_since >= _FAILING_S

    def progressed(self) -> None:
        """Note that it showed a sign of life."""
        self.last_progress = time.monotonic()

    def succeeded(self) -> None:
        """Note that it returned rollouts, or begins to serve: earlier failures no longer count."""
        self.progressed()
        self.failures = 0


class Fleet:
    """All servers of a run."""

    def __init__(
        self, servers: Sequence[Server], *, max_tokens_in_flight: int | None, on_fenced: Callable[[Server], None]
    ) -> None:
        """Args: servers: in the order of their names. max_tokens_in_flight: per server; None: twice its cache.
        on_fenced: called once for each server that is fenced, after its state changed."""
        self.servers = list(servers)
        self._limit = max_tokens_in_flight
        self._on_fenced = on_fenced
        self._changed = asyncio.Event()
        # Only the first in line waits for a change, so that one change does not wake hundreds of waiting requests.
        self._line = asyncio.Lock()
        self._mean_length: float | None = None
        self._closed = ""
        self.fenced_count = 0
        self.failure: asyncio.Future[EngineError] | None = None

    def of(self, *states: State) -> list[Server]:
        """Return the servers in one of these states."""
        return [server for server in self.servers if server.state in states]

    def start_again(self, server: Server) -> Server:
        """Replace a fenced server by a new one of the same name, for its next process; return that."""
        successor = Server(
            server.name,
            restarts=server.restarts + 1,
            awaited_restarts=server.awaited_restarts,
            served_at=server.served_at,
            reason=server.reason,
        )
        self.servers[self.servers.index(server)] = successor
        self._notify()
        return successor

    def hold_back(self, server: Server) -> None:
        """Send a server no requests until its next update: it lacks weights, or the trainer has its memory."""
        self._set_state(server, "joining")

    def begin_update(self, server: Server) -> None:
        """Take a server out of service for new weights."""
        server.reason = ""
        self._set_state(server, "updating")

    def serve(self, server: Server, version: int | None) -> None:
        """Let a server get requests. version: of its weights; None: those that it loaded at its start."""
        server.version, server.served_at = version, server.restarts
        server.succeeded()
        self._set_state(server, "serving")

    def suspect(self, server: Server) -> None:
        """Take a server out of service whose requests fail, while the cause is looked for."""
        self._set_state(server, "suspect")

    def fence(self, server: Server, reason: str) -> None:
        """Give a server up: its requests are cancelled (and retried elsewhere), and it gets no others."""
        if server.state == "fenced":
            return
        server.reason = reason
        server.given_up.set()
        self.fenced_count += 1
        self._set_state(server, "fenced")
        self._on_fenced(server)
        self._end_if_all_gone()

    def start_failed(self, server: Server, reason: str) -> None:
        """Give up a server that did not come up. Not counted as a fencing, and `on_fenced` is not called."""
        server.reason = reason
        self._set_state(server, "fenced")
        self._end_if_all_gone()

    def awaits(self) -> bool:
        """Whether the run waits for some server to come back (`Server.is_awaited`)."""
        return any(server.is_awaited for server in self.servers)

    async def returned(self) -> list[Server]:
        """Wait until a server is joining, and return all that are; empty if none is and none is awaited. Raises
        EngineError: all are gone."""
        while not (joining := self.of("joining")) and self.awaits():
            self.check()
            await self._changed.wait()
        self.check()
        return joining

    def fail(self, error: EngineError) -> None:
        """End the fleet: all present and later waits get this error."""
        if self.failure is None:
            self.failure = asyncio.get_running_loop().create_future()
        if not self.failure.done():
            self.failure.set_result(error)
        self._notify()

    def check(self) -> None:
        """Raise EngineError with what ended the fleet, if it has ended."""
        if self.failure is not None and self.failure.done():
            raise EngineError(str(self.failure.result()))
        if self._closed:
            raise EngineError(self._closed)

    async def fatal_error(self) -> EngineError:
        """Wait until the fleet has failed, and return why."""
        if self.failure is None:
            self.failure = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.failure)

    def close(self, reason: str) -> None:
        """Hand out no more servers: `acquire` and `returned` raise EngineError with this reason."""
        self._closed = reason
        self._notify()

    def _end_if_all_gone(self) -> None:
        """Fail the fleet if no server is left and none is awaited."""
        if not self.of("serving", "updating") and not self.awaits():
            last = "; ".join(f"{s.name}: {s.reason}" for s in self.servers if s.reason)
            self.fail(EngineError(f"all {len(self.servers)} SGLang servers are gone: {last}"))

    async def acquire(
        self, tokens: int, *, timeout_s: float, avoid: Server | None = None, prefer: Server | None = None
    ) -> Server:
        """Return the serving server with room that has the fewest tokens in flight; wait for one if none has room,
        first come first served, so that small requests do not starve a large one.

        Args:
            tokens: what the request will hold, by `estimate`. A request above a server's limit gets an idle server.
            timeout_s: longest time in which no request of any server ends and no server changes its state. A long line
                that moves does not time out, nor does a start that the run waits for, which has its own limit.
            avoid: server on which the request failed, taken only if no other has room. prefer: server that has the
                beginning of the request in its cache, taken if it has room.

        Raises:
            EngineError: all servers are gone, or the fleet was closed. DeadlineError: nothing moved in that time.
        """
        async with self._line:
            while (server := self._with_room(tokens, avoid, prefer)) is None:
                await self._change(timeout_s)
            server.tokens_in_flight += tokens
            return server

    async def _change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            # A joining server does not count: if it shares the trainer's GPUs, it may itself be waiting for the batch
            # that waits here.
            coming = [server for server in self.servers if server.is_awaited and server.state != "joining"]
            if coming and not self.of("serving", "updating"):
                return
            states = ", ".join(f"{s.name} {s.state}" for s in self.servers)
            raise DeadlineError(
                f"no SGLang server finished a request within {timeout_s:g} s ({states}), which is "
                "engine.sglang.request_timeout_s: raise it if the servers are only slow"
            ) from None

    def release(self, server: Server, tokens: int) -> None:
        """Give back the room that `acquire` reserved."""
        server.tokens_in_flight = max(server.tokens_in_flight - tokens, 0)
        self._notify()

    def estimate(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return the tokens that one sample will hold: its prompt, and an answer somewhat longer than the mean."""
        expected = max_new_tokens * _FIRST_GUESS if self._mean_length is None else self._mean_length * _MARGIN
        return prompt_tokens + max(1, min(max_new_tokens, int(expected)))

    def learn_lengths(self, lengths: Iterator[int]) -> None:
        """Update the mean with the lengths of finished answers."""
        for length in lengths:
            mean = length if self._mean_length is None else self._mean_length
            self._mean_length = mean + _MEMORY * (length - mean)

    def _set_state(self, server: Server, state: State) -> None:
        """Change a server's state and wake those who wait."""
        server.state = state
        self._notify()

    def _with_room(self, tokens: int, avoid: Server | None, prefer: Server | None) -> Server | None:
        self.check()
        fits = [
            server
            for server in self.of("serving")
            if not server.tokens_in_flight or server.tokens_in_flight + tokens <= self._capacity(server)
        ]
        order = {id(prefer): -1, id(avoid): 1}
        return min(fits, key=lambda server: (order.get(id(server), 0), server.tokens_in_flight), default=None)

    def _capacity(self, server: Server) -> int:
        if self._limit is not None:
            return self._limit
        return 2 * server.facts.max_tokens if server.facts else 0

    def _notify(self) -> None:
        """Have the first in line, and `returned`, look again."""
        self._changed.set()
        self._changed = asyncio.Event()
