"""Asks a server for the samples of a group: request, parsing, checks and text, wherever there is room for the work.

Place in the data flow: engine.py puts a Question for each group; whoever answers posts it, and hands back rollouts as
arrays. `DirectAnswers` does the work in its own process: in each of the run's answer workers (runtime/node_workers.py),
or in the engine's process where there are none. It refuses answers that do not fit, and knows nothing of fleets,
retries or groups that are under way: what a failure means is the engine's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_daro.engine.sglang import generation
from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.errors import EngineError
from megatron_daro.types import Rollout


class LostWorkerError(EngineError):
    """Who was asking the server is gone. The server is not to blame; another worker may ask again."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the server at `url` is asked for one group.

    calls: the HTTP requests, posted at once. version: weight version for servers that do not tell spans. loaded:
    version of the weights that servers are started with; None where none may answer with these any more. keeps_cache:
    an update does not make the server read its prompts anew (generation.py, `rollouts`).
    """

    url: str
    calls: tuple[generation.Call, ...]
    version: int
    loaded: int | None
    timeout_s: float
    keeps_cache: bool = False


class Answers(Protocol):
    """Whoever puts questions to servers."""

    @property
    def restarts(self) -> int:
        """Workers that were started again, since the start."""
        ...

    async def start(self) -> None:
        """Become ready to ask; again is nothing. Raises DaroError."""
        ...

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls, in their order; when it is cancelled, the connections are closed.

        Raises:
            UnreachableError: connection, deadline or 5xx. RefusedError: 4xx. BadAnswerError: the answer does not fit.
            LostWorkerError: nobody knows what became of the request.
        """
        ...

    async def close(self) -> None:
        """End what is being asked. May be called twice."""
        ...


class DirectAnswers:
    """Asks in this process, on the event loop of the caller."""

    restarts = 0

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Connect to nothing. Args: decode: token ids -> text."""
        self._decode = decode
        self._clients: dict[str, SGLangClient] = {}

    async def start(self) -> None:
        """Nothing is needed."""

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls. Raises as `Answers.ask` says."""
        client = self._clients.setdefault(question.url, SGLangClient(question.url))
        bodies = [call.body for call in question.calls]
        answers = await client.post_all("/generate", bodies, timeout_s=question.timeout_s)
        return tuple(
            rollout
            for call, answer in zip(question.calls, answers, strict=True)
            for rollout in generation.rollouts(
                call.request,
                answer,
                version=question.version,
                loaded=question.loaded,
                decode=self._decode,
                keeps_cache=question.keeps_cache,
            )
        )

    async def close(self) -> None:
        """Drop all connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()
