"""Answer workers: processes on the nodes that send the engine's questions to SGLang servers.

    driver: SGLangEngine -> AnswerWorkers.ask -> the least busy process (node_workers.py)
    process: AnswerWorker.ask -> DirectAsker.ask (engine/sglang/asking.py) -> HTTP

Workers send requests, parse, check and decode close to the servers; the driver maps their arrays from Ray's object
store, and copies them when it makes a batch (data/batch.py). A worker that dies loses no group: its questions fail as
LostWorkerError and the engine asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.engine.sglang.asking import DirectAsker, EndedAnswer, LostWorkerError, Question
from megatron_daro.garbage import spare_event_loop
from megatron_daro.observe import logs
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.node_workers import MANY_CALLS, NodeWorkers, alive_nodes, own_place
from megatron_daro.runtime.ray_calls import WorkerDiedError, actor_class, remote_class
from megatron_daro.types import Rollout

_TOGETHER_S = 0.05
"""Answers that end within this time are reported together."""
# A worker answers by the deadline of the request itself; after this much longer it counts as hung.
_GRACE_S = 60.0


@remote_class(max_restarts=0, max_task_retries=0, max_concurrency=MANY_CALLS)
class AnswerWorker:
    """Asks SGLang servers and makes rollouts of their answers, many at once on Ray's event loop."""

    def __init__(
        self,
        number: int,
        path: Path,
        trust_remote_code: bool,
        log_folder: Path | None,
        experts: ExpertsFolder | None = None,
    ) -> None:
        logs.take_over(log_folder, f"answer worker {number}")
        self._path, self._trust, self._experts = path, trust_remote_code, experts
        self._asker: DirectAsker | None = None
        self._ended: list[EndedAnswer] = []
        self._news = asyncio.Event()

    async def ready(self) -> tuple[str, int]:
        """Load the tokenizer; return node and process. Raises ModelError, not in the constructor: Ray cuts its
        messages."""
        if self._asker is None:
            decode = response_decoder(load_tokenizer(self._path, self._trust))
            self._asker = DirectAsker(decode, self._experts)
            self._asker.when_ended(self._take_ended)
            spare_event_loop()  # replies are millions of small lists: collections took two thirds of the time
        return own_place()

    def _take_ended(self, ended: Sequence[EndedAnswer]) -> None:
        self._ended += ended
        self._news.set()

    async def ended(self) -> list[EndedAnswer]:
        """Wait until answers have ended, and return all that ended since the last call, many at once."""
        await self._news.wait()
        await asyncio.sleep(_TOGETHER_S)
        self._news.clear()
        ended, self._ended = self._ended, []
        return ended

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of one group. Raises what `Asker.ask` raises."""
        assert self._asker is not None, "ask follows ready"
        return await self._asker.ask(question)


class AnswerWorkers:
    """The `Asker` of an engine: it asks through actors."""

    def __init__(self, run: RunContext) -> None:
        """Start nothing. `engine.sglang.answer_workers` processes are dealt out to the nodes in turn; unset: one on
        each."""
        self._count = run.config.engine.sglang.answer_workers
        model = run.config.model
        # Where the experts that servers chose are written to.
        experts = ExpertsFolder(run.run_dir) if run.config.actor.routing_replay else None

        def make(options: dict[str, Any], number: int) -> ActorHandle:
            worker = actor_class(AnswerWorker).options(**options)
            return worker.remote(number, model.path.absolute(), model.trust_remote_code, run.log_dir, experts)

        self.workers = NodeWorkers("answer worker", make, run)
        self._started = False
        self._take_ended: Callable[[Sequence[EndedAnswer]], None] = lambda ended: None

    @property
    def restarts(self) -> int:
        """How often a worker was restarted."""
        return self.workers.restarts

    async def start(self) -> None:
        """Start the processes and load the tokenizer in each; do nothing if they run. Raises DaroError."""
        if self._started:
            return
        self._started = True
        nodes = alive_nodes()
        await self.workers.start([nodes[i % len(nodes)] for i in range(self._count or len(nodes))])
        self.workers.listen("ended", lambda ended: self._take_ended(ended))

    def when_ended(self, take: Callable[[Sequence[EndedAnswer]], None]) -> None:
        """Have `take` called with answers that have ended, those of a few moments together."""
        self._take_ended = take

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls. Raises what `Asker.ask` raises."""
        try:
            return await self.workers.call("ask", question, timeout_s=question.timeout_s + _GRACE_S)
        except WorkerDiedError as error:
            raise LostWorkerError(str(error)) from None

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self.workers.close()
