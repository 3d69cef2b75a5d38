"""The answer workers of a run: Ray actors that ask SGLang servers, parse, check and decode, near the servers.

Place in the data flow: SGLangEngine -> Question -> an answer worker -> server -> rollouts, whose arrays the driver maps
from Ray's object store without a copy. A worker that dies loses no group: its requests fail as
LostWorkerError, and the engine makes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_daro.engine.sglang.answers import LostWorkerError, Question
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime.calls import WorkerDiedError
from megatron_daro.runtime.node_actors import AnswerWorker
from megatron_daro.runtime.node_workers import NodeWorkers, alive_nodes
from megatron_daro.types import Rollout

# A worker answers by the deadline of the request itself; one that does not within this more is hung.
_GRACE_S = 60.0


class AnswerWorkers:
    """`engine.sglang.answers.Answers`, by actors."""

    def __init__(
        self,
        count: int | None,
        model_path: Path,
        trust_remote_code: bool,
        *,
        logs: Path | None = None,
        warn: Callable[[str], None],
        deadlines: Deadlines,
    ) -> None:
        """Start nothing. Args: count: workers in sum, dealt out to the nodes in turn; None: one on each node.
        logs: folder for their logs."""
        self._count = count

        def make(options: dict[str, Any], number: int) -> Any:
            placed: Any = AnswerWorker.options(**options)  # type: ignore[attr-defined]
            return placed.remote(number, model_path, trust_remote_code, logs)

        self.workers = NodeWorkers("answer worker", make, warn=warn, deadlines=deadlines)
        self._started = False

    @property
    def restarts(self) -> int:
        """Workers that were started again."""
        return self.workers.restarts

    async def start(self) -> None:
        """Start the processes and load the tokenizer in each; again is nothing. Raises DaroError."""
        if self._started:
            return
        self._started = True
        nodes = alive_nodes()
        await self.workers.start([nodes[i % len(nodes)] for i in range(self._count or len(nodes))])

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls. Raises as `Answers.ask` says; WorkerError when no worker is left."""
        try:
            return await self.workers.call("ask", question, timeout_s=question.timeout_s + _GRACE_S)
        except WorkerDiedError as error:
            raise LostWorkerError(str(error)) from None

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self.workers.close()
