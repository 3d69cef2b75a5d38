"""Pools of worker processes (worker_pool/) for a whole run: its verifiers, and its environments with `step`.

    VerifierPools.score_async, EnvironmentPools.ask -> NodePools.call -> the driver's pool, or that of the node with the
    fewest calls under way (PoolWorker, node_workers.py)

On a single node the pool belongs to the driver, which saves a process (the verifiers' pool only with the embedded
engine). Otherwise each node has its share of the workers behind a Ray actor. Requests to a lost actor are sent to
another: a verdict depends on the answer alone, and a conversation's state goes along with each step, so the results are
the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray.actor import ActorHandle

from megatron_daro.config.sections import EnvironmentSection, RewardSection
from megatron_daro.environments.stepping import pool_of
from megatron_daro.observe import logs
from megatron_daro.reward.pool import RewardPool
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.node_workers import MANY_CALLS, NodeWorkers, alive_nodes, own_place
from megatron_daro.runtime.ray_calls import WorkerDiedError, actor_class, remote_class
from megatron_daro.types import Verdict
from megatron_daro.worker_pool.pool import WorkerPool

_Result = TypeVar("_Result")
MakePool = Callable[[int], WorkerPool]
"""Number of workers -> a pool that is not started."""
AskPool = Callable[..., Awaitable[Any]]
"""(pool, what it is asked) -> its reply."""


@remote_class(max_restarts=0, max_task_retries=0, max_concurrency=MANY_CALLS)
class PoolWorker:
    """A pool on this node; its processes end with this one, however it ends."""

    def __init__(self, name: str, make: MakePool, ask: AskPool, workers: int, log_folder: Path | None) -> None:
        logs.take_over(log_folder, name)
        self._pool, self._ask = make(workers), ask

    async def ready(self) -> tuple[str, int]:
        """Start the workers; return node and process. Raises DaroError: they cannot run."""
        await asyncio.to_thread(self._pool.start)
        return own_place()

    async def ask(self, *request: object) -> tuple[Any, tuple[str, int], int]:
        """Return the reply, node and process, and the pool's failed starts so far. Raises DaroError."""
        return await self._ask(self._pool, *request), own_place(), self._pool.failed_starts


class NodePools:
    """The pools of one kind."""

    def __init__(
        self, kind: str, make: MakePool, ask: AskPool, workers: int, run: RunContext, *, in_driver: bool = True
    ) -> None:
        """Start nothing. Args: kind: for messages, such as "verifier pool". workers: how many, dealt out to the nodes.
        in_driver: whether the pool is in this process if there is only one node."""
        self._make, self._ask, self._count, self._in_driver = make, ask, workers, in_driver
        self._shares: list[int] = []

        def start_one(options: dict[str, Any], number: int) -> ActorHandle:
            worker = actor_class(PoolWorker).options(**options)
            return worker.remote(f"{kind} {number}", make, ask, self._shares[number], run.log_dir)

        self.workers = NodeWorkers(kind, start_one, run, deadline="pool_start")
        self.pool: WorkerPool | None = None
        self._started = False
        self._failed_starts: dict[tuple[str, int], int] = {}  # by node and process

    @property
    def restarts(self) -> int:
        """How often a node's pool was lost and restarted."""
        return self.workers.restarts

    @property
    def failed_starts(self) -> int:
        """How many starts of processes failed and were tried again, as far as pools have reported it."""
        return self.pool.failed_starts if self.pool is not None else sum(self._failed_starts.values())

    async def start(self) -> None:
        """Start the processes; do nothing if they run. Raises DaroError."""
        if self._started:
            return
        self._started = True
        nodes = alive_nodes()
        if len(nodes) == 1 and self._in_driver:
            self.pool = self._make(self._count)
            await asyncio.to_thread(self.pool.start)
            return
        self._shares = shares(self._count, len(nodes))
        await self.workers.start(nodes)

    async def call(self, *request: object) -> Any:
        """Return the reply. A request's parts are separate arguments, since Ray sends small ones along with the call.

        Raises:
            DaroError: a pool failed. WorkerError: all are lost, each after as many starts as are allowed.
        """
        if self.pool is not None:
            return await self._ask(self.pool, *request)
        return await self._call_a_node(*request)

    async def _call_a_node(self, *request: object) -> Any:
        while True:
            try:
                reply, place, failed_starts = await self.workers.call("ask", *request)
            except WorkerDiedError:
                continue  # bounded: each worker is restarted only so often
            self._failed_starts[place] = failed_starts
            return reply

    async def close(self) -> None:
        """End all processes; those of other nodes end with their actors. May be called twice."""
        if self.pool is not None:
            await asyncio.to_thread(self.pool.close)
        self.workers.close()


class VerifierPools(NodePools):
    """The `Scorer` of a run."""

    def __init__(self, run: RunContext) -> None:
        """Start nothing. `reward.workers` processes are dealt out to the nodes."""
        section, in_driver = run.config.reward, run.config.engine.kind == "embedded"
        super().__init__(
            "verifier pool", partial(_verifiers, section), _verdicts, section.workers, run, in_driver=in_driver
        )

    async def score_async(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Return the verdicts of (answer text, gold answer, statement of the problem), in order. Raises what `call`
        raises."""
        verdicts: list[Verdict] = await self.call(*pairs)
        return verdicts


class EnvironmentPools(NodePools):
    """The `EnvironmentPool` of an environment. It is made on the run's event loop, where Ray's calls run; it may be
    asked from any loop."""

    def __init__(self, run: RunContext, section: EnvironmentSection) -> None:
        """Start nothing. The section's `workers` are dealt out to the nodes."""
        super().__init__("environment pool", partial(pool_of, section), WorkerPool.ask, section.workers, run)
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Start the processes of every node. Raises DaroError: an environment cannot be made."""
        await self._on_the_runs_loop(super().start())

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of a worker.

        Raises:
            RolloutError: the user's class does not do what its Protocol says. WorkerError: all pools are lost.
        """
        reply: dict[str, Any] = await self.call(request)
        return reply

    async def _call_a_node(self, *request: object) -> Any:
        return await self._on_the_runs_loop(super()._call_a_node(*request))

    async def _on_the_runs_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def _verifiers(section: RewardSection, workers: int) -> RewardPool:
    return RewardPool.from_section(section.model_copy(update={"workers": workers}))


async def _verdicts(pool: RewardPool, *pairs: tuple[str, str, str]) -> list[Verdict]:
    return await pool.score_async(pairs)


def shares(workers: int, nodes: int) -> list[int]:
    """Return the number of processes of each node: `workers` in sum, but at least one on each."""
    return [max(1, workers // nodes + (i < workers % nodes)) for i in range(nodes)]
