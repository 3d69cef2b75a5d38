"""The servers of a run: which one gets the next request, which one is given up, and whether any is left.

generation.py takes a server for each request and gives it back. Only one that serves is handed out, and nobody waits
for servers when all are gone. A server's state changes in these methods alone:

    hold_back      starting; serving, suspect, joining  -> joining
    begin_update   serving, joining                     -> updating
    serve          updating; as loaded also joining     -> serving
    suspect        serving                              -> suspect
    fence          any                                  -> fenced, for ever
    start_failed   starting                             -> fenced, for ever
    start_again    fenced                               -> another takes its place: starting
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
trainer; serving: it gets requests; updating: its weights change; suspect: its requests fail, and it is looked why;
fenced: given up."""

# Before any answer came, one is taken to be this part of the longest.
_FIRST_GUESS = 0.25
# A new length moves the running mean by this much; a few dozen groups decide it.
_MEMORY = 0.05
# Answers longer than the mean are the ones that fill a server.
_MARGIN = 1.5
# A server is given up when so many requests failed with no success between, over so many seconds: a moment in which
# everything under way at once is refused is no reason to start a server again.
_FAILURES_IN_A_ROW, _FAILING_S = 5, 3.0


@dataclass(eq=False)
class Server:
    """One process of a server and what is known of it. The next process is another object (`start_again`): whoever
    began with this one, and goes on when that one runs, changes nothing of it. Its state only the fleet changes; other
    fields are set where they are learned.

    facts: once it answered. version: of its weights while it serves. versions: all that it was given (receiving.py).
    adapter: where versions are adapters, the one that new requests name; adapters: that it has -> requests under way
    that name it (receiving.py, generation.py). released: memory that it gave back, by SGLang's names (memory.py): a
    joining server lacks weights, memory or both. failures: in a row.

    Of the processes before it, too: restarts: how many they were. awaited_restarts: for how many the run waits at most.
    served_at: at how many restarts one served last. reason: why the last was given up, or what a sending said.
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
        """Whether it is taken to answer."""
        return self.state not in ("starting", "fenced")

    @property
    def is_awaited(self) -> bool:
        """Whether it may come to serve, so that the run waits for it where no other server is left.

        One that joins or is suspect is awaited. One that was given up or starts is where it served before (else what
        kept it from that will be there again), through three starts in a row after which it served nobody and as far
        as `max_restarts` allows; not where somebody else would have to start it, or the trainer to leave its GPUs first
        (`awaited_restarts` is 0).
        """
        if self.is_up or self.served_at is None:
            return self.state in ("joining", "suspect")
        start = self.restarts + (self.state == "fenced")  # the one that goes on, or comes next
        return start <= min(self.awaited_restarts, self.served_at + STARTS)

    def failed(self) -> bool:
        """Note that a request to it failed. Returns whether that is enough to give it up."""
        now = time.monotonic()
        if not self.failures:
            self.failing_since = now
        self.failures += 1
        return self.failures >= _FAILURES_IN_A_ROW and now - self.failing_since >= _FAILING_S

    def progressed(self) -> None:
        """Note that it did something, right or wrong."""
        self.last_progress = time.monotonic()

    def succeeded(self) -> None:
        """Note that it gave rollouts, or serves (again): what failed before does not count any more."""
        self.progressed()
        self.failures = 0


class Fleet:
    """All servers of a run."""

    def __init__(
        self, servers: Sequence[Server], *, max_tokens_in_flight: int | None, on_fenced: Callable[[Server], None]
    ) -> None:
        """Args: servers: in the order of their names. max_tokens_in_flight: per server; None: twice its cache.
        on_fenced: called once for every fencing, after the state changed."""
        self.servers = list(servers)
        self._limit = max_tokens_in_flight
        self._on_fenced = on_fenced
        self._changed = asyncio.Event()
        # The first in line waits for a change, the others for their turn: hundreds that wait are not all woken by each.
        self._line = asyncio.Lock()
        self._mean_length: float | None = None
        self._closed = ""
        self.fenced_count = 0
        self.failure: asyncio.Future[EngineError] | None = None

    def of(self, *states: State) -> list[Server]:
        """Return the servers in one of these states."""
        return [server for server in self.servers if server.state in states]

    def start_again(self, server: Server) -> Server:
        """Put another process in the place of one that was given up; returns it."""
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
        """Give a server no request until an update: it was started and lacks weights, or the trainer has its memory."""
        self._set_state(server, "joining")

    def begin_update(self, server: Server) -> None:
        """Take a server out of service for new weights."""
        server.reason = ""
        self._set_state(server, "updating")

    def serve(self, server: Server, version: int | None) -> None:
        """Let a server that has its weights get requests. version: of the weights; None: those that it loaded."""
        server.version, server.served_at = version, server.restarts
        server.succeeded()
        self._set_state(server, "serving")

    def suspect(self, server: Server) -> None:
        """Take a server out of service since its requests fail, until it is known why."""
        self._set_state(server, "suspect")

    def fence(self, server: Server, reason: str) -> None:
        """Give a server up: its requests are cancelled (and made elsewhere), and it gets no others."""
        if server.state == "fenced":
            return
        server.reason = reason
        server.given_up.set()
        self.fenced_count += 1
        self._set_state(server, "fenced")
        self._on_fenced(server)
        self._end_if_all_gone()

    def start_failed(self, server: Server, reason: str) -> None:
        """Give up a server that did not come up."""
        server.reason = reason
        self._set_state(server, "fenced")
        self._end_if_all_gone()

    def awaits(self) -> bool:
        """Whether a server may come back that the run waits for (`Server.is_awaited`)."""
        return any(server.is_awaited for server in self.servers)

    async def returned(self) -> list[Server]:
        """Wait until a server that is awaited can take weights; empty where none is awaited. EngineError: all are
        gone."""
        while not (joining := self.of("joining")) and self.awaits():
            self.check()
            await self._changed.wait()
        self.check()
        return joining

    def fail(self, error: EngineError) -> None:
        """End the fleet: everyone who waits, or comes later, gets this error."""
        if self.failure is None:
            self.failure = asyncio.get_running_loop().create_future()
        if not self.failure.done():
            self.failure.set_result(error)
        self._notify()

    def check(self) -> None:
        """Raise what ended the fleet, if something did."""
        if self.failure is not None and self.failure.done():
            raise EngineError(str(self.failure.result()))
        if self._closed:
            raise EngineError(self._closed)

    async def fatal_error(self) -> EngineError:
        """Wait for the end of the fleet, and return why."""
        if self.failure is None:
            self.failure = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.failure)

    def close(self, reason: str) -> None:
        """Nobody gets a server any more."""
        self._closed = reason
        self._notify()

    def _end_if_all_gone(self) -> None:
        """End the fleet where no server is left, and none is awaited."""
        if not self.of("serving", "updating") and not self.awaits():
            last = "; ".join(f"{s.name}: {s.reason}" for s in self.servers if s.reason)
            self.fail(EngineError(f"all {len(self.servers)} SGLang servers are gone: {last}"))

    async def acquire(
        self, tokens: int, *, timeout_s: float, avoid: Server | None = None, prefer: Server | None = None
    ) -> Server:
        """Return the serving server with the fewest tokens in flight that has room; waits for one, first come first
        served, so that small requests do not starve a large one.

        Args:
            tokens: what the request will hold, as `estimate` says. One that exceeds a server's limit gets an idle one.
            timeout_s: longest time in which no request of any server ends and no server changes its state: a long line
                that moves is no reason to give up, nor is a start that the run waits for, which has its own limit.
            avoid: taken only where no other has room: one on which the request failed. prefer: taken where it has room:
                one that has the beginning of the request in its cache.

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
            # One that joins may wait for the batch that waits here, where it has the trainer's GPUs.
            coming = [server for server in self.servers if server.is_awaited and server.state != "joining"]
            if coming and not self.of("serving", "updating"):
                return
            states = ", ".join(f"{s.name} {s.state}" for s in self.servers)
            raise DeadlineError(
                f"no SGLang server finished a request within {timeout_s:g} s ({states}), which is "
                "engine.sglang.request_timeout_s: raise it if the servers are only slow"
            ) from None

    def release(self, server: Server, tokens: int) -> None:
        """Give back what `acquire` took."""
        server.tokens_in_flight = max(server.tokens_in_flight - tokens, 0)
        self._notify()

    def estimate(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Tokens that one sample will hold: its prompt, and an answer somewhat longer than the mean so far."""
        expected = max_new_tokens * _FIRST_GUESS if self._mean_length is None else self._mean_length * _MARGIN
        return prompt_tokens + max(1, min(max_new_tokens, int(expected)))

    def learn_lengths(self, lengths: Iterator[int]) -> None:
        """Take the lengths of finished answers into the mean."""
        for length in lengths:
            mean = length if self._mean_length is None else self._mean_length
            self._mean_length = mean + _MEMORY * (length - mean)

    def _set_state(self, server: Server, state: State) -> None:
        """Change a server's state and wake those who wait for one."""
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
        """Have the first in line look again, and `returned`."""
        self._changed.set()
        self._changed = asyncio.Event()
