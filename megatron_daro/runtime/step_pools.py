"""Worker processes of environments with `step`, on all nodes of the cluster.

SteppedConversations -> the least busy node's pool -> a step. On one machine the pool belongs to the driver; on several
each node has its share of `environment.workers` behind a Ray actor. A conversation's state goes along with each step,
so one whose node is lost goes on elsewhere with the same step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ray.actor import ActorHandle

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.environments.stepping import pool_of
from megatron_daro.observe import logs
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.node_workers import MANY_CALLS, NodeWorkers, alive_nodes, own_place, shares
from megatron_daro.runtime.supervisor import WorkerDiedError, actor_class, remote_class
from megatron_daro.worker_pool.pool import WorkerPool

_Result = TypeVar("_Result")


@remote_class(max_restarts=0, max_task_retries=0, max_concurrency=MANY_CALLS)
class StepWorker:
    """A pool of an environment's processes on this node; they end with this process, however it ends."""

    def __init__(self, number: int, section: EnvironmentSection, workers: int, log_folder: Path | None) -> None:
        logs.take_over(log_folder, f"environment pool {number}")
        self._pool = pool_of(section, workers)

    async def ready(self) -> tuple[str, int]:
        """Node and process, when the environments are made. Raises RolloutError: one cannot be."""
        await asyncio.to_thread(self._pool.start)
        return own_place()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of a worker. Raises RolloutError."""
        return await self._pool.ask(request)


class StepPools:
    """The `StepPool` of a run. Made on the run's event loop, where Ray's calls live; asked from any."""

    def __init__(self, run: RunContext, section: EnvironmentSection) -> None:
        """The section's `workers` are dealt out to the nodes."""
        self._section = section
        self._loop = asyncio.get_running_loop()
        self._shares: list[int] = []
        self._pool: WorkerPool | None = None

        def make(options: dict[str, Any], number: int) -> ActorHandle:
            workers = self._shares[number]
            return actor_class(StepWorker).options(**options).remote(number, section, workers, run.log_dir)

        self._workers = NodeWorkers("environment pool", make, run)

    @property
    def restarts(self) -> int:
        """Pools of nodes that were started again."""
        return self._workers.restarts

    async def start(self) -> None:
        """Start the processes of every node. Raises DaroError: an environment cannot be made."""
        await self._on_the_runs_loop(self._start())

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of a worker.

        Raises:
            RolloutError: the user's class does something else than its Protocol says. WorkerError: all pools are lost.
        """
        if self._pool is not None:
            return await self._pool.ask(request)
        return await self._on_the_runs_loop(self._ask_a_node(request))

    async def close(self) -> None:
        """End all processes. May be called twice."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        self._workers.close()

    async def _start(self) -> None:
        nodes = alive_nodes()
        if len(nodes) == 1:
            self._pool = pool_of(self._section, self._section.workers)
            await asyncio.to_thread(self._pool.start)
            return
        self._shares = shares(self._section.workers, len(nodes))
        await self._workers.start(nodes)

    async def _ask_a_node(self, request: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                reply: dict[str, Any] = await self._workers.call("ask", request)
                return reply
            except WorkerDiedError:
                continue  # bounded: every loss counts towards the worker's last start

    async def _on_the_runs_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
