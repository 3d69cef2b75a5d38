"""Asking a server: the HTTP requests of one group are posted at once, and the replies become rollouts.

    Question -> POST /generate (client.py) -> checked and made into rollouts (replies.py)

Each answer arrives when it has ended, as an event of a stream or in a request of its own, and its room on the server is
then free for other requests. If the connection breaks, the answers that had ended are kept; if one does not fit, none
is. Only a server with --incremental-streaming-output answers a request as a whole.

`DirectAsker` does this in the process that makes it; each of the run's answer workers (runtime/answer_workers.py) has
one. It knows nothing of fleets, retries or other groups; the engine decides what a failure means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from megatron_daro.engine.sglang.client import SGLangClient, UnreachableError
from megatron_daro.engine.sglang.replies import BadAnswerError, Sample, SampleEnd, StreamEvent, read, rollouts_of
from megatron_daro.engine.sglang.request import Call, length_so_far
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.types import GroupRequest, Rollout


class CutShortError(UnreachableError):
    """Some answers did not come. rollouts: those that came."""

    rollouts: tuple[Rollout, ...] = ()


class LostWorkerError(EngineError):
    """The worker that was asking the server is gone. The server is not to blame; another worker may ask again."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the server at `url` is asked for one group.

    calls: the HTTP requests, posted at once. version: weight version for servers that report no spans. loaded: version
    given to tokens from the weights that the server loaded at its start (with adapters, the newest adapter's); None: no
    token may come from these. vocabulary: of the model (`rollouts_of`).
    """

    url: str
    calls: tuple[Call, ...]
    version: int
    loaded: int | None
    timeout_s: float
    vocabulary: int | None = None


class EndedAnswer(NamedTuple):
    """A sample that has ended. id: the server's name of it. tokens: length of the answer, including tokens from before
    a retry."""

    id: str
    tokens: int


class Asker(Protocol):
    """Puts questions to servers."""

    @property
    def restarts(self) -> int:
        """How often a worker was restarted since the start."""
        ...

    async def start(self) -> None:
        """Become ready to ask; does nothing if ready. Raises DaroError."""
        ...

    def when_ended(self, take: Callable[[Sequence[EndedAnswer]], None]) -> None:
        """Call `take` with answers as they end, while others of their group are still being generated."""
        ...

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls, in their order; when it is cancelled, the connections are closed.

        Raises:
            UnreachableError: connection, deadline or 5xx; CutShortError if some answers came. RefusedError: 4xx.
            BadAnswerError: the answer does not fit.
            LostWorkerError: the worker was lost, and the request's outcome with it. WorkerError: no worker is left.
        """
        ...

    async def close(self) -> None:
        """End all questions that are being asked. May be called twice."""
        ...


class DirectAsker:
    """Asks in this process, on the event loop of the caller."""

    restarts = 0

    def __init__(self, decode: Callable[[Sequence[int]], str], experts: ExpertsFolder | None = None) -> None:
        """Connect to nothing. Args: decode: token ids -> text. experts: folder for the experts that servers chose."""
        self._decode, self._experts = decode, experts
        self._clients: dict[str, SGLangClient] = {}
        self._turn = asyncio.Lock()
        self._ended: Callable[[Sequence[EndedAnswer]], None] = lambda ended: None

    def when_ended(self, take: Callable[[Sequence[EndedAnswer]], None]) -> None:
        """Call `take` with each answer as it ends."""
        self._ended = take

    async def start(self) -> None:
        """Nothing is needed."""

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls. Raises as `Asker.ask` says."""
        client = self._clients.setdefault(question.url, SGLangClient(question.url))
        # Groups that wait for the same thing, such as new weights, all resume at once, and opening a thousand
        # connections in one go would block the event loop for seconds. So each question gets a turn of the loop.
        async with self._turn:
            await asyncio.sleep(0)
        tasks = [asyncio.create_task(self._answers(client, question, call)) for call in question.calls]
        try:
            # Awaited here: a gather that is cancelled from outside would be reported as an exception never retrieved.
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # a server aborts requests whose connection is closed
                task.cancel()
        rollouts = tuple(rollout for part, _ in answers for rollout in part)
        failures = [failure for _, failure in answers if failure]
        if not failures:
            return rollouts
        if not rollouts:
            raise failures[0]
        cut = CutShortError(str(failures[0]))
        cut.rollouts = rollouts
        raise cut from failures[0]

    def _rollouts(self, question: Question, request: GroupRequest, answers: object) -> tuple[Rollout, ...]:
        return rollouts_of(
            request,
            answers,
            version=question.version,
            loaded=question.loaded,
            decode=self._decode,
            vocabulary=question.vocabulary,
            experts=self._experts,
        )

    async def _answers(
        self, client: SGLangClient, question: Question, call: Call
    ) -> tuple[tuple[Rollout, ...], UnreachableError | None]:
        """Return (the rollouts of one request that ended, in the order of its samples; why the others did not end).
        Raises RefusedError or BadAnswerError, as `Asker.ask`."""
        ended: dict[int, Sample] = {}
        try:
            if call.streams:
                answers = await self._streamed(client, call, question.timeout_s, ended)
            else:
                answers = await client.post("/generate", call.body, timeout_s=question.timeout_s)
        except UnreachableError as error:
            request = replace(call.request, indices=tuple(call.request.indices[i] for i in sorted(ended)))
            return self._rollouts(question, request, [ended[i] for i in sorted(ended)]), error
        rollouts = self._rollouts(question, call.request, answers)
        if not call.streams:
            pairs = zip(call.ids, rollouts, strict=True)
            self._ended([EndedAnswer(name, r.response_length) for name, r in pairs if r.finish_reason != "abort"])
        return rollouts, None

    async def _streamed(self, client: SGLangClient, call: Call, timeout_s: float, ended: dict[int, Sample]) -> object:
        """Return the answers of one request; put each into `ended`, by its place among the samples, when it ends."""
        async with aclosing(client.stream("/generate", call.body, timeout_s=timeout_s)) as events:
            async for event in events:
                if isinstance(event, list):  # it does not stream
                    return event
                about = read(StreamEvent, event)
                index, reason = about.index, about.meta_info.finish_reason
                if reason is None:
                    continue  # its first token
                if index >= len(call.ids):
                    raise BadAnswerError(f"an event of sample {index}; allowed: 0 to {len(call.ids) - 1}")
                _check_status(client.url, reason)
                ended[index] = read(Sample, event)
                if reason.type != "abort":
                    so_far = length_so_far(call.request, call.request.indices[index])
                    self._ended([EndedAnswer(call.ids[index], so_far + len(ended[index].ids))])
        return [ended[index] for index in sorted(ended)]

    async def close(self) -> None:
        """Drop all connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()


def _check_status(url: str, reason: SampleEnd) -> None:
    """Raise the error for the status with which the server would have answered if it did not stream.

    Source: `_handle_abort_finish_reason` in sglang/srt/managers/tokenizer_manager.py, 0.5.23.
    """
    status = reason.status_code
    if status is None or reason.type != "abort" or not 400 <= status < 600:
        return
    kind = RefusedError if status < 500 else UnreachableError
    raise kind(f"{url}/generate: status {status}: {reason.message or ''}")
