"""The Ray actors that need no torch: one SGLang server, one process that asks servers, one pool of verifiers.

Place in the data flow: sglang_group.py, answer_workers.py and verdicts.py call them; all work is done by engine/sglang/
and reward/. Thin shells, apart from workers.py because a process that imports no torch starts in a fifth of the time
and takes a quarter of the memory. A run outlives each of them: whoever calls one sees that it is gone.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import ray

from megatron_daro.config.sections import RewardSection
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.engine.sglang.answers import DirectAnswers, Question
from megatron_daro.engine.sglang.servers import LaunchOptions, ServerProcess
from megatron_daro.observe import logs
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Rollout, Verdict

_actor: Any = ray.remote  # Ray's stubs do not know what a decorated class becomes
# Calls that an asynchronous actor has under way at most: all groups of a large batch wait in it for their servers.
_MANY_CALLS = 100_000


@_actor(max_restarts=0, max_task_retries=0)
class ServerWorker:
    """One SGLang server process, or one of several of a server that is spread over nodes, on the node and with the GPUs
    that Ray gave this actor; it ends with the actor."""

    def __init__(self, options: LaunchOptions) -> None:
        self._server = ServerProcess(options, ray.util.get_node_ip_address())

    def launch(self, meeting: str = "") -> tuple[str, str]:
        """Start the process; its URL, and where the other parts of its server meet it. meeting: that of the first."""
        return self._server.launch(meeting), self._server.meeting

    def death(self) -> str:
        """Why the process is gone; empty while it lives."""
        return self._server.death()

    def stop(self) -> None:
        """End the process."""
        self._server.stop()


@_actor(max_restarts=0, max_task_retries=0, max_concurrency=_MANY_CALLS)
class AnswerWorker:
    """Asks SGLang servers and makes rollouts of their answers, many at once on Ray's event loop."""

    def __init__(self, number: int, path: Path, trust_remote_code: bool, log_folder: Path | None) -> None:
        logs.take_over(log_folder, f"answer worker {number}")
        self._path, self._trust = path, trust_remote_code
        self._answers: DirectAnswers | None = None

    async def ready(self) -> tuple[str, int]:
        """Node and process, when the tokenizer is loaded. Raises ModelError: here, since Ray cuts what a start says."""
        if self._answers is None:
            self._answers = DirectAnswers(response_decoder(load_tokenizer(self._path, self._trust)))
        return _own_place()

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of one group. Raises as `Answers.ask` says."""
        assert self._answers is not None, "ask follows ready"
        return await self._answers.ask(question)


@_actor(max_restarts=0, max_task_retries=0, max_concurrency=_MANY_CALLS)
class VerdictWorker:
    """A pool of verifier processes on this node; they end with this process, however it ends."""

    def __init__(self, number: int, section: RewardSection, workers: int, log_folder: Path | None) -> None:
        logs.take_over(log_folder, f"verifier pool {number}")
        self._pool = RewardPool.from_section(section.model_copy(update={"workers": workers}))

    async def ready(self) -> tuple[str, int]:
        """Node and process, when the verifiers run."""
        await asyncio.to_thread(self._pool.start)
        return _own_place()

    async def score(self, *pairs: tuple[str, str, str]) -> list[Verdict]:
        """Verdicts in order; an argument each, since Ray sends small ones along with the call. Raises RewardError."""
        return await self._pool.score_async(pairs)

    async def counters(self) -> dict[str, int]:
        """Return what the pool did so far."""
        return self._pool.counters

    async def stop(self) -> None:
        """End the verifiers in order."""
        await asyncio.to_thread(self._pool.close)


def _own_place() -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), os.getpid()
