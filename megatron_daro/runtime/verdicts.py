"""Verdicts from all nodes: one pool of killable verifier processes on each, behind the Scorer Protocol.

Place in the data flow: answers of a group -> the pool with the fewest calls under way -> verdicts. Where the cluster is
one machine and the engine an embedded one, the pool belongs to the driver: it has time, and a run starts one process
fewer. A pool whose actor is lost is started again, and its answers are verified elsewhere: a verdict depends on
the answer alone, so nothing changes by that. Refuses to score after close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_daro.config.sections import RewardSection
from megatron_daro.errors import WorkerError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime.calls import WorkerDiedError
from megatron_daro.runtime.node_actors import VerdictWorker
from megatron_daro.runtime.node_workers import NodeWorkers, alive_nodes
from megatron_daro.types import Verdict

_STOP_S = 30.0


class Verdicts:
    """The verifiers of a run."""

    def __init__(
        self,
        section: RewardSection,
        *,
        beside_driver: bool,
        logs: Path | None = None,
        warn: Callable[[str], None],
        deadlines: Deadlines,
    ) -> None:
        """Start nothing.

        Args:
            section: the configuration's reward section; `workers` processes are dealt out to the nodes.
            beside_driver: whether one node's pool may belong to this process.
            logs: folder for the logs of the others.
        """
        self._section, self._beside_driver = section, beside_driver
        self._shares: list[int] = []

        def make(options: dict[str, Any], number: int) -> Any:
            placed: Any = VerdictWorker.options(**options)  # type: ignore[attr-defined]
            return placed.remote(number, section, self._shares[number], logs)

        self.workers = NodeWorkers("verifier pool", make, warn=warn, deadlines=deadlines)
        self.pool: RewardPool | None = None
        self._started = False

    async def start(self) -> None:
        """Start the processes; again is nothing. Raises DaroError."""
        if self._started:
            return
        self._started = True
        nodes = alive_nodes()
        if len(nodes) == 1 and self._beside_driver:
            self.pool = RewardPool.from_section(self._section)
            await asyncio.to_thread(self.pool.start)
            return
        self._shares = shares(self._section.workers, len(nodes))
        await self.workers.start(nodes)

    async def score_async(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Verdicts of (answer text, gold answer, statement of the problem), in order.

        Raises:
            RewardError: a pool failed. WorkerError: all are lost, each after as many starts as are allowed.
        """
        if self.pool is not None:
            return await self.pool.score_async(pairs)
        while True:
            try:
                return await self.workers.call("score", *pairs)
            except WorkerDiedError:
                continue  # bounded: every loss counts towards the worker's last start

    async def close(self) -> None:
        """End all processes. May be called twice."""
        if self.pool is not None:
            await asyncio.to_thread(self.pool.close)
            return
        try:
            async with asyncio.timeout(_STOP_S):
                await self.workers.each("stop")
        except (WorkerError, TimeoutError):
            pass  # they end with their actors
        self.workers.close()


def shares(workers: int, nodes: int) -> list[int]:
    """Return verifier processes of each node: `workers` in sum, but at least one on each."""
    return [max(1, workers // nodes + (i < workers % nodes)) for i in range(nodes)]
