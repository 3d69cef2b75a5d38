"""Rollouts from a fleet of servers, request by request: which server is asked, and retries after failures.

    generate -> _answer, one for each request: asks until all its samples have ended, or 8 tries failed
      _try:  a server with room (fleet.py) -> HTTP requests (request.py) -> _ask -> keeps what came, gives room back
      _ask:  Asker.ask, in a process of the answer workers (runtime/answer_workers.py) -> POST /generate (client.py)
             -> replies checked and made into rollouts (replies.py)

A request (for K answers of a group; in a conversation, for one) goes to the server with the fewest tokens in flight, or
to the server of the previous turn. The room that each answer takes there is given back when that answer has come. This
process routes the request; answer workers post it, parse the replies and decode the tokens, and this process gets
finished rollouts. A failed request is retried, on another server if possible. One that was cut short by a weight update
continues from the tokens it has (in training no request runs during an update, but another caller's may). Answers that
say that they come from weights that their server was never given are rejected, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_daro.backoff import backoff_s
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.adapters import Adapters
from megatron_daro.engine.sglang.asking import Asker, CutShortError, EndedAnswer, LostWorkerError, Question
from megatron_daro.engine.sglang.client import SGLangClient, UnreachableError
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.replies import BadAnswerError
from megatron_daro.engine.sglang.request import Call, calls_of
from megatron_daro.engine.sglang.supervision import Supervision
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.types import GroupRequest, Rollout

_TRIES = 8
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_ABORT_S, _ABORT_AGAIN_S = 10.0, 1.0
_MOST_CONVERSATIONS = 50_000
_Result = TypeVar("_Result")


class _GivenUpError(EngineError):
    """The server was fenced while it worked on a request."""


class ServerGeneration:
    """Generates rollouts on the servers of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        supervision: Supervision,
        asker: Asker,
        options: SGLangSection,
        adapters: Adapters,
        *,
        seed: int,
        vocabulary: int | None,
        warn: Callable[[str], None],
    ) -> None:
        """Args: asker: asks servers. seed: of sampling. vocabulary: of the model, see `rollouts_of`. warn: shows a
        warning."""
        self._fleet, self._supervision, self._asker, self._options = fleet, supervision, asker, options
        self._adapters, self._seed = adapters, seed
        self._vocabulary, self._warn = vocabulary, warn
        self._prefix, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._running: set[RunningRequest] = set()
        self._last_servers = LastServers()
        # Of each sample that is being generated: its server, and the tokens reserved for it there.
        self._held: dict[str, tuple[Server, int]] = {}
        asker.when_ended(self._take_ended)
        self._begins = asyncio.Lock()
        self._aborting: set[asyncio.Task[None]] = set()
        self.retries = 0

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request as soon as all of them ended; closing the iterator aborts the rest."""
        runs = [RunningRequest(request) for request in requests]
        self._running.update(runs)
        tasks = {asyncio.create_task(self._answer(run)): run for run in runs}
        try:
            for finished in asyncio.as_completed(tasks):
                rollouts = await finished
                if rollouts:
                    yield rollouts
        finally:
            self._running.difference_update(runs)
            unfinished = [run for task, run in tasks.items() if not task.done()]
            for run in unfinished:  # so that samples cut short by the abort are not requested again
                run.stop.set()
            try:
                await self._abort_on_servers(unfinished)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all); `generate` yields them with the tokens they have."""
        stopped = [run for run in self._running if group_ids is None or run.request.group_id in group_ids]
        for run in stopped:
            run.stop.set()
        await self._abort_on_servers(stopped)
        again = asyncio.create_task(self._abort_again(stopped))
        self._aborting.add(again)
        again.add_done_callback(self._aborting.discard)

    def close(self) -> None:
        """Stop all requests; the servers are not told. May be called twice."""
        for task in self._aborting:
            task.cancel()
        for run in list(self._running):
            run.stop.set()

    def new_name(self) -> str:
        """Return a name that no other request has had."""
        return f"{self._prefix}-{next(self._numbers)}"

    async def _answer(self, run: RunningRequest) -> tuple[Rollout, ...]:
        """Return all rollouts of a request, or those there are when it is stopped or has failed too often."""
        async with self._begins:  # one request per turn of the event loop: a thousand at once would block it
            await asyncio.sleep(0)
        run.partial = dict(run.request.partial)
        failures = 0
        while failures < _TRIES and not run.stop.is_set():
            request = run.remaining()
            if not request.indices:
                break
            try:
                await self._try(run, request)
            except RefusedError as error:
                raise EngineError(f"prompt {request.prompt.id}: the server refused the request: {error}") from error
            except (UnreachableError, BadAnswerError, LostWorkerError, _GivenUpError) as error:
                failures += 1
                self.retries += 1
                if failures == _TRIES:
                    self._warn(f"group {request.group_id} failed {_TRIES} times, the last time: {error}")
                await until_stopped(asyncio.sleep(_pause_s(failures)), run.stop)
        return run.collected()

    async def _try(self, run: RunningRequest, request: GroupRequest) -> None:
        """Ask one server for all missing samples of a request and keep what comes; do nothing if the request is stopped
        before a server has room."""
        tokens_of = {index: self._estimate(request, index) for index in request.indices}
        server = await self._server_with_room(run, request, sum(tokens_of.values()))
        if server is None:
            return
        version, adapter = server.version or 0, server.adapter
        server.adapters[adapter] += 1
        calls = calls_of(
            request,
            self.new_name(),
            seed=self._seed,
            cache_key=f"{self._prefix}-weights-{version}",
            streams=server.facts is not None and not server.facts.streams_deltas,
            adapter=adapter,
        )
        run.server, run.ids = server, tuple(name for call in calls for name in call.ids)
        for name, index in zip(run.ids, (index for call in calls for index in call.request.indices), strict=True):
            self._held[name] = server, tokens_of[index]
        ids = run.ids
        try:
            rollouts = await self._ask(server, calls, version)
            self._check_versions(server, request, rollouts)
            if not run.take(rollouts) and not run.stop.is_set():
                raise BadAnswerError(f"{server.name} aborted all answers before a new token had come")
        except (UnreachableError, BadAnswerError) as error:
            run.failed_on = server
            if isinstance(error, CutShortError):
                self._check_versions(server, request, error.rollouts)
                if run.take(error.rollouts):
                    server.succeeded()
            await self._count_failure(server, error)
            raise
        finally:
            run.ids, run.server = (), None
            server.adapters[adapter] -= 1
            self._adapters.unload_unused(server)
            last = {name: self._held.pop(name)[1] for name in ids if name in self._held}
            self._fleet.release(server, sum(last.values()))
        server.succeeded()
        self._last_servers.note(request, server)
        ended_now = (r for name, r in zip(ids, rollouts, strict=True) if name in last)
        self._fleet.learn_lengths(r.response_length for r in ended_now if r.finish_reason != "abort")

    async def _server_with_room(self, run: RunningRequest, request: GroupRequest, tokens: int) -> Server | None:
        """Reserve room for a request on a server; returns None if the request is stopped first."""
        room = asyncio.ensure_future(
            self._fleet.acquire(
                tokens,
                timeout_s=self._options.request_timeout_s,
                avoid=run.failed_on,
                prefer=self._last_servers.of(request),
            )
        )
        try:
            return await until_stopped(room, run.stop)
        except asyncio.CancelledError:
            if room.done() and not room.cancelled() and not room.exception():
                self._fleet.release(room.result(), tokens)
            raise

    def _take_ended(self, ended: Sequence[EndedAnswer]) -> None:
        """Give back the room of these answers, while the others of their group go on."""
        for answer in ended:
            server, tokens = self._held.pop(answer.id, (None, 0))
            if server is not None:
                server.progressed()
                self._fleet.release(server, tokens)
                self._fleet.learn_lengths(iter([answer.tokens]))

    def _estimate(self, request: GroupRequest, index: int) -> int:
        earlier = request.partial.get(index)
        generated = earlier.response_length if earlier else 0
        return self._fleet.estimate(len(request.prompt.tokens) + generated, request.room(index))

    async def _ask(self, server: Server, calls: Sequence[Call], version: int) -> tuple[Rollout, ...]:
        """Return the answers. Raises _GivenUpError if the server is given up meanwhile."""
        # Answers may come from the weights that the server loaded at its start until it gets others; with adapters it
        # always keeps those.
        loaded = None if server.versions and not server.adapter else version
        limit = self._options.request_timeout_s
        question = Question(server.url, tuple(calls), version, loaded, limit, self._vocabulary)
        work = asyncio.create_task(self._asker.ask(question))
        given_up, ended = (
            asyncio.ensure_future(server.given_up.wait()),
            asyncio.ensure_future(self._fleet.fatal_error()),
        )
        try:
            waits: set[asyncio.Future[Any]] = {work, given_up, ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            self._fleet.check()
            raise _GivenUpError(f"{server.name} was given up: {server.reason}")
        finally:
            for task in (work, given_up, ended):
                task.cancel()

    def _check_versions(self, server: Server, request: GroupRequest, rollouts: Sequence[Rollout]) -> None:
        """Reject new tokens of weights that the server was never given, and fence it: it was replaced unnoticed."""
        given = server.versions
        unknown = {version for rollout in rollouts for version in _new_versions(request, rollout)} - given
        if given and unknown:
            reason = f"it answered with weights of version {min(unknown)}; it was given {sorted(given)}"
            self._fleet.fence(server, reason)
            raise BadAnswerError(f"{server.name}: {reason}")

    async def _count_failure(self, server: Server, error: EngineError) -> None:
        """Count a failed request; give the server up if its process is gone or failures pile up."""
        await self._supervision.examine(server)
        if server.failed() and server.state == "serving":
            self._supervision.give_up(server, f"{server.failures} requests in a row failed, the last: {error}")

    async def _abort_on_servers(self, runs: Sequence[RunningRequest]) -> None:
        """Abort requests on the servers where they run."""
        ids: dict[SGLangClient, list[str]] = defaultdict(list)
        for run in runs:
            if run.server:
                ids[run.server.client] += run.ids

        async def abort(client: SGLangClient) -> None:
            async with self._begins:  # one server per turn of the event loop, as in `_answer`
                await asyncio.sleep(0)
            await client.abort(ids[client], timeout_s=_ABORT_S)

        await asyncio.gather(*map(abort, ids))

    async def _abort_again(self, runs: Sequence[RunningRequest]) -> None:
        """Repeat the abort every second until all have ended. An abort that overtakes its request is lost: the server
        ignores a name that it does not know yet, and would generate to the limit.

        Source: `abort_request` in sglang/srt/managers/tokenizer_manager.py, 0.5.23 ("elif ... tokenizer_worker_num").
        """
        while True:
            await asyncio.sleep(_ABORT_AGAIN_S)
            runs = [run for run in runs if run.server]
            if not runs:
                return
            await self._abort_on_servers(runs)


def _new_versions(request: GroupRequest, rollout: Rollout) -> Iterator[int]:
    """Yield the weight versions of a rollout's new tokens; those before may be another server's."""
    earlier, end = request.partial.get(rollout.index), 0
    for version, tokens in rollout.version_spans:
        end += tokens
        if earlier is None or end > earlier.response_length:
            yield version


def _pause_s(failures: int) -> float:
    """Return the pause before the next try, with jitter: many requests fail at the same moment."""
    return backoff_s(failures - 1, first_s=_PAUSE_S, longest_s=_LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)


@dataclass(eq=False)
class RunningRequest:
    """A request that is being answered.

    stop: set when no more of it is wanted. server, ids: where it runs now, and the server's names of its samples.
    failed_on: the last server that failed. done, partial: finished and unfinished rollouts, by index.
    """

    request: GroupRequest
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ids: tuple[str, ...] = ()
    server: Server | None = None
    failed_on: Server | None = None
    done: dict[int, Rollout] = field(default_factory=dict)
    partial: dict[int, Rollout] = field(default_factory=dict)

    def remaining(self) -> GroupRequest:
        """Return the request for the samples that have not finished."""
        indices = tuple(i for i in self.request.indices if i not in self.done)
        return replace(self.request, indices=indices, partial={i: r for i, r in self.partial.items() if i in indices})

    def take(self, rollouts: Sequence[Rollout]) -> bool:
        """Keep what came; return whether anything of it is new."""
        before = sum(r.response_length for r in self.partial.values()), len(self.done)
        for rollout in rollouts:
            if rollout.finish_reason != "abort":
                self.done[rollout.index] = rollout
            elif rollout.response_length:
                self.partial[rollout.index] = rollout
        return (sum(r.response_length for r in self.partial.values()), len(self.done)) != before

    def collected(self) -> tuple[Rollout, ...]:
        """Return the finished rollouts, and the partial ones that are newer than those of the request."""
        cut = {i: r for i, r in self.partial.items() if r is not self.request.partial.get(i)}
        by_index = cut | self.done
        return tuple(by_index[i] for i in self.request.indices if i in by_index)


class LastServers:
    """Which server answered the last turn of a conversation: the next one finds its tokens in that server's cache."""

    def __init__(self) -> None:
        self._servers: OrderedDict[tuple[int, int, int], Server] = OrderedDict()

    def of(self, request: GroupRequest) -> Server | None:
        """Look the server up; None for a first turn."""
        return self._servers.get(self._key(request)) if request.turn else None

    def note(self, request: GroupRequest, server: Server) -> None:
        """Remember who answered; the oldest of very many are forgotten. A request for several answers has no further
        turn, so its server is not noted."""
        if len(request.indices) > 1:
            return
        self._servers[self._key(request)] = server
        self._servers.move_to_end(self._key(request))
        if len(self._servers) > _MOST_CONVERSATIONS:
            self._servers.popitem(last=False)

    @staticmethod
    def _key(request: GroupRequest) -> tuple[int, int, int]:
        return request.group_id, request.attempt, request.indices[0]


async def until_stopped(work: Awaitable[_Result], stop: asyncio.Event) -> _Result | None:
    """Return the result of `work`, or None when `stop` comes first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
