"""Many conversations at once: the Rollouter of an environment, with steps or of agents.

GroupRequest -> one `Conversation` for each rollout -> Rollout with its verdict. Conversations and the user's coroutines
run in a thread of their own (thread.py); what they ask for is requested from the run's loop (turn_requests.py):

    Conversations.generate   waits for the next group whose conversations have all ended
      _Running               one conversation in the thread: waits for its end, with a limit on its own time
        Environment.rollout  waits for `Conversation.generate`, hence for TurnRequests and the engine

Failed conversations are counted and come back as "abort". Every wait for an environment has a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from megatron_daro.backoff import backoff_s
from megatron_daro.config.sections import EnvironmentSection, RewardSection
from megatron_daro.environments.environment import (
    Conversation,
    ConversationFailedError,
    ConversationSettings,
    Environment,
    OutOfRoomError,
)
from megatron_daro.environments.thread import EnvironmentThread
from megatron_daro.environments.turn_requests import TurnRequests
from megatron_daro.errors import DaroError, RolloutError
from megatron_daro.rollout.protocol import Engine, Notices, Scorer
from megatron_daro.types import GroupRequest, Prompt, Rollout, Verdict

_GRACE_S = 5.0
"""Time that an environment has to end once it is cancelled."""
_MOST_FAILURES, _FAILING_S = 64, 60.0
"""The environment is taken to be broken, and not just some of its tasks, once this many conversations in a row have
failed over at least this many seconds: that a tool's service refuses all that is under way for a moment is no reason to
end a run."""
_PAUSE_S, _LONGEST_PAUSE_S = 8.0, 16.0
"""Pause before a conversation is begun again while all fail: what they need may be back soon. A run ends after at least
three empty batches with three tries each. With the pauses these take longer than _FAILING_S, so that it ends with the
error of the last conversation."""
_RESTARTED, _FAILED, _TIMEOUTS = "environment/restarted", "environment/failed", "environment/timeouts"
_TOOL_CALLS, _TOOL_ERRORS = "environment/tool_calls", "environment/tool_errors"
_POOLS = "environment/pool_restarts"


class _Call:
    """The conversations of one `generate`. Used on the run's event loop.

    running: those that have begun and not ended. given_up: groups that were aborted. begins: held by the group whose
    turn it is to begin its conversations.
    """

    def __init__(self, thread: EnvironmentThread, turns: TurnRequests, requests: Sequence[GroupRequest]) -> None:
        self.thread, self.turns = thread, turns
        self.running: dict[Conversation, _Running] = {}
        self.given_up: set[int] = set()
        self.begins = asyncio.Lock()
        self.group_ids = {request.group_id for request in requests}


class _Running:
    """A conversation in the environments' thread, seen from the run's loop. ended: its rollout, or what it raised."""

    def __init__(
        self,
        thread: EnvironmentThread,
        conversation: Conversation,
        environment: Environment,
        section: EnvironmentSection,
        pause_s: float,
    ) -> None:
        self._thread, self._conversation, self._section = thread, conversation, section
        self.ended: asyncio.Future[Rollout] = thread.run_loop.create_future()
        self._task: asyncio.Task[Rollout] | None = None
        self._cancelled = False
        self.ended.add_done_callback(lambda _: self._timer.cancel())
        if pause_s:
            self._timer = thread.run_loop.call_later(pause_s, self._begin, environment)
        else:
            self._begin(environment)

    def _begin(self, environment: Environment) -> None:
        self._timer = self._thread.run_loop.call_later(self._section.timeout_s, self._check_time)
        self._thread.to_environment.post(self._start, environment)

    def _check_time(self) -> None:
        """Cancel the conversation if its own time is used up; else check again when it may be."""
        remaining_s = self._section.timeout_s - self._conversation.own_s
        if remaining_s > 0:
            self._timer = self._thread.run_loop.call_later(max(remaining_s, 0.05), self._check_time)
        elif not self._conversation.aborted:
            self._conversation.timed_out = self._conversation.aborted = True
            self.cancel()

    def cancel(self) -> None:
        """Cancel the conversation. If it does not end soon, `ended` raises a RolloutError."""
        if not self._cancelled and not self.ended.done():
            self._cancelled = True
            self._thread.to_environment.post(self._cancel)
            self._thread.run_loop.call_later(_GRACE_S, self._give_up)

    def _start(self, environment: Environment) -> None:
        if not self._cancelled:
            self._task = self._thread.loop.create_task(_guarded(self._conversation.hold(environment)))
            self._task.add_done_callback(self._report)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # it has not begun, and will not
            self._thread.to_run.post(self.ended.cancel)

    def _report(self, task: asyncio.Task[Rollout]) -> None:
        self._thread.to_run.post(self._end, task)

    def _end(self, task: asyncio.Task[Rollout]) -> None:
        if self.ended.done():
            return
        if task.cancelled():
            self.ended.cancel()
        elif error := task.exception():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as seen: nobody may be waiting any more
        else:
            self.ended.set_result(task.result())

    def _give_up(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(
                RolloutError(
                    f"{self._section.title}: a conversation does not end {_GRACE_S:g} s after it was "
                    "cancelled: it blocks its event loop, or catches CancelledError; fix: await what takes long, "
                    "and let the error pass"
                )
            )
            self.ended.exception()


async def _guarded(work: Coroutine[Any, Any, Rollout]) -> Rollout:
    try:
        return await work
    except (KeyboardInterrupt, SystemExit) as error:  # would end the thread for all
        raise RuntimeError(f"{type(error).__name__} was raised") from error


class Conversations:
    """The Rollouter of one environment."""

    def __init__(
        self,
        section: EnvironmentSection,
        environment: Environment,
        engine: Engine,
        scorer: Scorer,
        *,
        reward: RewardSection,
        decode: Callable[[Sequence[int]], str],
        vocabulary: int,
        together: bool,
        notices: Notices,
    ) -> None:
        """Start nothing.

        Args:
            section: the configuration's environment section. environment: holds the conversations. engine: generates
                each turn.
            scorer: answers `Conversation.verify`. reward: has the rewards that `Conversation.verdict` gives. decode:
                token ids -> text.
            vocabulary: token ids are below it. together: whether the engine gets the turns of all conversations in
            one call, as fits one that works on one batch at a time. notices: told about failures.
        """
        self._section, self._environment, self._engine, self._scorer = section, environment, engine, scorer
        self._shared = ConversationSettings(section.title, decode, vocabulary, reward, section.reward_weights)
        self._together, self._notices = together, notices
        self._thread: EnvironmentThread | None = None
        self._calls: set[_Call] = set()
        names = (_RESTARTED, _FAILED, _TIMEOUTS, _TOOL_CALLS, _TOOL_ERRORS, _POOLS)
        reasons = (f"{_FAILED}/{reason}" for reason in environment.failure_reasons)
        self._counts = dict.fromkeys((*names, *reasons), 0)
        # Evaluations, whose group ids are negative, are counted apart, since a resumed run does not repeat them all.
        self._counts_of_evaluations = dict(self._counts)
        self._failures_in_a_row, self._failing_since = 0, 0.0

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the conversations of each request once all have ended; those that were aborted or failed are "abort".

        Raises:
            RolloutError: the environment returned what cannot be trained on, does not end, or failed 64 times in a
            row over 60 s or more. EngineError, RewardError.
        """
        self._thread = thread = self._thread or EnvironmentThread()
        conversations = sum(len(request.indices) for request in requests)
        turns = TurnRequests(self._engine, self._scorer, thread, conversations, together=self._together)
        call = _Call(thread, turns, requests)
        self._calls.add(call)
        tasks = {asyncio.create_task(self._group(call, request)) for request in requests}
        ended: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        waited: list[asyncio.Future[Any]] = [*tasks, turns.failure]
        for one in waited:
            one.add_done_callback(ended.put_nowait)
        try:
            for _ in tasks:
                group = await ended.get()
                if turns.failure.done():
                    turns.failure.result()
                yield group.result()
        finally:
            turns.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._calls.discard(call)
            await turns.close()

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """End the conversations of these groups (None: all); they come back as "abort"."""
        for call in self._calls:
            call.given_up |= call.group_ids if group_ids is None else set(group_ids)
            for conversation, running in list(call.running.items()):
                if conversation.group_id in call.given_up:
                    conversation.aborted = True
                    running.cancel()
        await self._engine.abort(group_ids)

    async def score(self, rollouts: Sequence[tuple[Rollout, Prompt]]) -> list[Verdict]:
        """Return what the environment said."""
        verdicts = [rollout.verdict for rollout, _ in rollouts if rollout.verdict is not None]
        assert len(verdicts) == len(rollouts), "every finished conversation has a verdict"
        return verdicts

    def counters(self) -> dict[str, int]:
        """Return counts since the run began: conversations that did not finish (all, those that failed, those that took
        too long), tool calls of the others, and pools of nodes that were started again."""
        return self._counts | {_POOLS: self._counts[_POOLS] + self._environment.pool_restarts}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from the counts of a checkpoint."""
        self._counts = {name: int(counters.get(name, 0)) for name in self._counts}

    async def close(self) -> None:
        """End the environments' thread and worker processes. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        await self._environment.close()

    async def _group(self, call: _Call, request: GroupRequest) -> tuple[Rollout, ...]:
        async with call.begins:  # one group per turn of the event loop, which a thousand at once would block
            await asyncio.sleep(0)
        outcomes, running = [], []
        for index in request.indices:
            conversation = Conversation(request, index, call.turns, self._shared)
            outcomes.append(call.thread.run_loop.create_future())
            if request.group_id in call.given_up:
                call.turns.one_ended()
                outcomes[-1].set_result(conversation.ended("abort"))
                continue
            running.append(self._run(call, conversation, outcomes[-1]))
        try:
            return tuple(await asyncio.gather(*outcomes))
        finally:
            for one in running:
                one.cancel()
            if waiting := [one.ended for one in running if not one.ended.done()]:
                await asyncio.wait(waiting, timeout=_GRACE_S)

    def _run(self, call: _Call, conversation: Conversation, outcome: asyncio.Future[Rollout]) -> _Running:
        """Begin a conversation, after a pause if it is a retry and none has succeeded since others failed. outcome:
        gets what becomes of it."""
        tried, pause_s = conversation.request.attempt, 0.0
        if tried and self._failures_in_a_row:
            pause_s = backoff_s(tried - 1, first_s=_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        running = _Running(call.thread, conversation, self._environment, self._section, pause_s)
        call.running[conversation] = running

        def end(_: object) -> None:
            del call.running[conversation]
            call.turns.one_ended()
            if outcome.done():
                return
            try:
                aborted = call.turns.failure.done()
                outcome.set_result(conversation.ended("abort") if aborted else self._outcome(conversation, running))
            except Exception as error:  # it ends the run
                outcome.set_exception(error)

        running.ended.add_done_callback(end)
        return running

    def _outcome(self, conversation: Conversation, running: _Running) -> Rollout:
        """Return the finished rollout, or what there is of one that was aborted or failed."""
        if conversation.fault is not None:
            raise conversation.fault
        counts = self._counts if conversation.group_id >= 0 else self._counts_of_evaluations
        error = None if running.ended.cancelled() else running.ended.exception()
        if isinstance(error, DaroError) and not isinstance(error, OutOfRoomError):
            raise error
        if not running.ended.cancelled() and error is None and not conversation.aborted:
            self._failures_in_a_row = 0
            rollout = running.ended.result()
            counts[_TOOL_CALLS] += sum(report.tool_calls for report in rollout.reports)
            counts[_TOOL_ERRORS] += sum(report.tool_errors for report in rollout.reports)
            return rollout
        counts[_RESTARTED] += 1
        if conversation.timed_out:
            self._failed(counts, _TIMEOUTS, f"took more than timeout_s={self._section.timeout_s:g} s of its own")
        elif isinstance(error, ConversationFailedError) and error.reason == "timeout":
            self._failed(counts, _TIMEOUTS, str(error))
        elif isinstance(error, ConversationFailedError):
            if f"{_FAILED}/{error.reason}" in counts:
                counts[f"{_FAILED}/{error.reason}"] += 1
            self._failed(counts, _FAILED, f"failed: {error}")
        elif not conversation.aborted:
            text = f"{type(error).__name__}: {error}" if error else "CancelledError"
            self._failed(counts, _FAILED, f"raised {text}")
        return conversation.ended("abort")

    def _failed(self, counts: dict[str, int], counter: str, what: str) -> None:
        """Count a failure; warn of the 1st, 2nd, 4th... Raises RolloutError: too many in a row, for too long."""
        counts[counter] += 1
        now = asyncio.get_running_loop().time()
        if not self._failures_in_a_row:
            self._failing_since = now
        self._failures_in_a_row += 1
        failing_s = now - self._failing_since
        count = counts[counter]
        text = f"{self._section.title}: a conversation {what}"
        if self._failures_in_a_row >= _MOST_FAILURES and failing_s >= _FAILING_S:
            raise RolloutError(
                f"{text}; {self._failures_in_a_row} failed in a row, for {failing_s:.0f} s; fix: correct it or the "
                "service that it needs, or raise its timeout_s"
            )
        if count.bit_count() == 1:
            self._notices.warn(f"{text}; it is begun again. {counter} is {count}; said again at {2 * count}")
