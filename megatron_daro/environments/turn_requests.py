"""What the conversations of one call ask for: the next turn from the engine, a verdict from the verifiers.

Conversation, on the environments' loop -> TurnRequests, on the run's -> Engine, Scorer -> back. It refuses answers that
were not asked for, and those whose columns do not fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_daro.environments.environment import nothing_said
from megatron_daro.environments.thread import EnvironmentThread
from megatron_daro.errors import DaroError, EngineError
from megatron_daro.rollout.collector import check_shape
from megatron_daro.rollout.protocol import Engine, Scorer
from megatron_daro.rollout.rollouter import judge
from megatron_daro.types import GroupRequest, Prompt, Rollout, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class _TurnRequest:
    """A request for one rollout. tokens: int32, of its prompt. answer: a future of the environments' loop."""

    request: GroupRequest
    tokens: np.ndarray
    answer: asyncio.Future[Rollout]

    @property
    def key(self) -> tuple[int, int, int]:
        """Group, attempt and rollout."""
        return self.request.group_id, self.request.attempt, self.request.indices[0]

    def settle(self, rollout: Rollout) -> None:
        """Hand the answer over, on the environments' loop, unless nobody waits for it any more."""
        if not self.answer.done():
            self.answer.set_result(rollout)


class TurnRequests:
    """The requests of one `generate`. Used on the run's event loop, except `ask`, `verify`, `stand_back` and
    `come_back`, which are called on the environments' loop.

    failure: what the engine or the verifiers raised, which ends all conversations.
    """

    def __init__(
        self, engine: Engine, scorer: Scorer, thread: EnvironmentThread, conversations: int, *, together: bool
    ) -> None:
        """Ask nothing yet.

        Args:
            conversations: how many will ask. together: whether the engine is asked once for all conversations under
                way, each time all of them wait for it: an engine that works on one batch at a time then gets whole
                batches, and the same ones in each run.
        """
        self.failure: asyncio.Future[None] = thread.run_loop.create_future()
        self._engine, self._scorer, self._thread, self._together = engine, scorer, thread, together
        self._conversations = conversations
        self._waiting: list[_TurnRequest] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._begins_soon = self._closing = False

    def ask(self, request: GroupRequest, tokens: np.ndarray) -> asyncio.Future[Rollout]:
        """Return a future of the engine's answer, finish reason "abort" where there is none. tokens: of the prompt."""
        turn = _TurnRequest(request, tokens, self._thread.loop.create_future())
        self._thread.to_run.post(self._take, turn)
        return turn.answer

    def verify(self, text: str, prompt: Prompt) -> asyncio.Future[Verdict]:
        """Return a future of a verdict. What the verifiers raise ends the run."""
        work = self._verify(text, prompt)
        try:
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._thread.run_loop))
        except RuntimeError:  # the run's loop is closed: this conversation was left behind
            work.close()
            raise

    def one_began(self) -> None:
        """Let the others wait for one conversation more."""
        self._conversations += 1

    def stand_back(self) -> None:
        """Keep others from waiting for a conversation that asks for nothing before `come_back`; on the environments'
        loop."""
        self._thread.to_run.post(self.one_ended)

    def come_back(self) -> None:
        """Let the others wait for that conversation again."""
        self._thread.to_run.post(self.one_began)

    def one_ended(self) -> None:
        """Let the others wait for one conversation fewer."""
        self._conversations -= 1
        if self._together and not self._closing:
            self._begin_if_all_wait()

    def stop(self) -> None:
        """Begin nothing more."""
        self._closing = True

    async def close(self) -> None:
        """Cancel what is asked of the engine."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for turn in self._waiting:
            self._thread.to_environment.post(turn.answer.cancel)
        if self.failure.done():
            self.failure.exception()  # marks it as seen

    def _fail(self, error: Exception) -> None:
        """End all conversations with this error, whatever they do with it."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _take(self, turn: _TurnRequest) -> None:
        self._waiting.append(turn)
        if self._closing:
            self._thread.to_environment.post(turn.answer.cancel)
        elif self._together:
            self._begin_if_all_wait()
        elif not self._begins_soon:  # with all requests that are taken in this turn of the loop
            self._begins_soon = True
            self._thread.run_loop.call_soon(self._begin)

    async def _verify(self, text: str, prompt: Prompt) -> Verdict:
        try:
            return (await judge(self._scorer, [(text, prompt)]))[0]
        except DaroError as error:
            self._fail(error)
            raise

    def _begin_if_all_wait(self) -> None:
        if len(self._waiting) < self._conversations:  # most of the time
            return
        waiting = len({turn.key for turn in self._waiting if not turn.answer.done()})
        if waiting and waiting >= self._conversations:
            self._begin()

    def _begin(self) -> None:
        self._begins_soon = False
        if self._closing:
            return
        waiting: dict[tuple[int, int, int], _TurnRequest] = {}
        for turn in self._waiting:  # one request per rollout: an engine tells them apart by its number
            if not turn.answer.done():
                waiting.setdefault(turn.key, turn)
        chosen = list(waiting.values())
        self._waiting = [turn for turn in self._waiting if turn not in chosen and not turn.answer.done()]
        if self._waiting and not self._together:
            self._thread.run_loop.call_soon(self._begin)
        if chosen:
            task = asyncio.ensure_future(self._answer(chosen))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _answer(self, turns: Sequence[_TurnRequest]) -> None:
        """Call the engine once for these turns; each gets its answer as soon as it is there."""
        requests = sorted((turn.request for turn in turns), key=lambda one: (one.group_id, one.draw, one.indices[0]))
        by_key = {turn.key: turn for turn in turns}
        unanswered = dict(by_key)
        try:
            async for rollouts in self._engine.generate(_merged(requests) if self._together else requests):
                for rollout in rollouts:
                    key = rollout.group_id, rollout.attempt, rollout.index
                    if key not in by_key:
                        raise EngineError(f"engine answered group, attempt and rollout {key}, which was not asked for")
                    check_shape(rollout, by_key[key].tokens)
                    unanswered.pop(key, None)
                    self._thread.to_environment.post(by_key[key].settle, rollout)
        except Exception as error:  # whatever it is, all conversations end with it
            self._fail(error)
        for turn in unanswered.values():
            self._thread.to_environment.post(turn.settle, nothing_said(turn.request))
        if self._together and not self._closing:
            self._begin_if_all_wait()


def _merged(requests: Sequence[GroupRequest]) -> list[GroupRequest]:
    """Return the same, with the rollouts of one group that go on from equal tokens, drawn and sampled alike, in one
    request."""
    merged: dict[Any, list[GroupRequest]] = {}
    for one in requests:
        merged.setdefault((one.group_id, one.draw, one.prompt.tokens, one.sampling), []).append(one)
    return [replace(some[0], indices=tuple(one.indices[0] for one in some)) for some in merged.values()]
