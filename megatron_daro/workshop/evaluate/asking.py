"""The loop of an evaluation: asks an engine for answers, has each verified, and keeps it.

Works with any engine and scorer of rollout/protocol.py. Answers are verified and written while others are generated.
Every wait has a limit, and an answer that an abort cut off is not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

from megatron_daro.deadlines import first_cause
from megatron_daro.errors import DeadlineError
from megatron_daro.rollout.protocol import Engine, Scorer
from megatron_daro.rollout.rollouter import judge
from megatron_daro.types import GroupRequest, Rollout
from megatron_daro.workshop.evaluate.answers import Answer, AnswerStore
from megatron_daro.workshop.evaluate.questions import Question

_VERIFIED_TOGETHER = 256
_WATCH_S = 1.0
# Limit for verdicts in flight when an evaluation ends early, so that answers already generated are not requested again.
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What an evaluation drives. window: requests in flight at once; None: all of them in one call, for an engine that
    forms its own batches. told: called after each kept answer. patience_s: longest time without any answer."""

    engine: Engine
    scorer: Scorer
    store: AnswerStore
    window: int | None
    told: Callable[[Answer], None]
    patience_s: float


async def ask(parts: Parts, requests: Sequence[GroupRequest], questions: Sequence[Question]) -> None:
    """Ask for every request. However this ends, the answers that came are kept.

    Raises:
        DeadlineError: no answer came for `patience_s`. The first error of engine, scorer or disk.
    """
    answers = _AnswerRecorder(parts, {question.group_id: question for question in questions})
    try:
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(answers.watch())
            if parts.window is None:
                await answers.stream(requests)
            else:
                left = iter(requests)
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(parts.window, len(requests))):
                        workers.create_task(answers.work(left))
            watcher.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        await answers.drain()
        parts.store.flush()


class _AnswerRecorder:
    """Has rollouts verified, and keeps the answers that were not aborted."""

    def __init__(self, parts: Parts, questions: dict[int, Question]) -> None:
        self._parts, self._questions = parts, questions
        self._room = asyncio.Semaphore(_VERIFIED_TOGETHER)
        self._last = time.monotonic()
        self._writing = asyncio.Lock()
        self._verifying: set[asyncio.Task[None]] = set()

    async def stream(self, requests: Sequence[GroupRequest]) -> None:
        """Make all requests in one call."""
        async with asyncio.TaskGroup() as verifying:
            async for rollouts in self._parts.engine.generate(requests):
                await self._room.acquire()
                verifying.create_task(self._release_after(self._begin(self._take(rollouts))))

    async def work(self, left: Iterator[GroupRequest]) -> None:
        """Make one request after the other."""
        for request in left:
            async for rollouts in self._parts.engine.generate([request]):
                await asyncio.shield(self._begin(self._take(rollouts)))

    async def drain(self) -> None:
        """Wait some seconds for answers that are being verified or written, and cancel those that take longer."""
        if self._verifying:
            await asyncio.wait(self._verifying, timeout=_DRAIN_S)
        for task in self._verifying:
            task.cancel()

    async def watch(self) -> None:
        """Write waiting answers from time to time. Raises DeadlineError if no answer came for `patience_s`."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._write_if_due()
            silent = time.monotonic() - self._last
            if silent > self._parts.patience_s:
                raise DeadlineError(
                    f"deadline 'next_group': no answer came for {silent:.0f} s; if the engine is only slow, raise "
                    "trainer.deadline_scale; else look at its log"
                )

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start work that continues to its end even if the task that (shielded) waits for it is cancelled."""
        task = asyncio.create_task(work)
        self._verifying.add(task)
        task.add_done_callback(self._verifying.discard)
        return task

    async def _take(self, rollouts: Sequence[Rollout]) -> None:
        """Verify and keep the rollouts that were not aborted."""
        self._last = time.monotonic()
        whole = [one for one in rollouts if one.finish_reason != "abort"]
        questions = [self._questions[one.group_id] for one in whole]
        texts = [(q.held_out.verified_text(one.text), q.prompt) for one, q in zip(whole, questions, strict=True)]
        verdicts = await judge(self._parts.scorer, texts)
        for one, question, verdict in zip(whole, questions, verdicts, strict=True):
            answer = Answer(question.prompt, one, verdict)
            self._parts.store.add(answer)
            self._parts.told(answer)
        await self._write_if_due()

    async def _release_after(self, work: asyncio.Task[None]) -> None:
        try:
            await asyncio.shield(work)
        finally:
            self._room.release()

    async def _write_if_due(self) -> None:
        if self._parts.store.due and not self._writing.locked():
            async with self._writing:
                await asyncio.shield(self._begin(asyncio.to_thread(self._parts.store.write, self._parts.store.take())))
