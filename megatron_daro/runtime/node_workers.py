"""Equal Ray actors spread over the nodes: answer workers (answer_workers.py), verifier pools and environments'
(step_pools.py).

A call goes to the least busy worker of a set. Unlike the policy's ranks they hold nothing that a run needs, so the
run outlives them: the caller of a lost one gets WorkerDiedError and calls again, while another is started, at most
`MAX_RESTARTS` times. The actors are thin shells, apart from workers.py because a process that imports no
torch starts in a fifth of the time and takes a quarter of the memory.

Verifier pools stand behind the Scorer Protocol: a group's answers go to the pool with the fewest calls under way. On
one machine with the embedded engine the pool belongs to the driver, which saves a process. A lost pool's answers are
verified elsewhere; a verdict depends on the answer alone, so nothing changes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_daro.backoff import backoff_s
from megatron_daro.config.sections import RewardSection
from megatron_daro.errors import DeadlineError, WorkerError
from megatron_daro.observe import logs
from megatron_daro.reward.pool import RewardPool
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.supervisor import DEATHS, WorkerDiedError, actor_class, gather, remote_class, translated
from megatron_daro.types import Verdict

MANY_CALLS = 100_000
"""Calls that an asynchronous actor has under way at most: all groups of a large batch wait in it for their servers."""


@remote_class(max_restarts=0, max_task_retries=0, max_concurrency=MANY_CALLS)
class VerdictWorker:
    """A pool of verifier processes on this node; they end with this process, however it ends."""

    def __init__(self, number: int, section: RewardSection, workers: int, log_folder: Path | None) -> None:
        logs.take_over(log_folder, f"verifier pool {number}")
        self._pool = RewardPool.from_section(section.model_copy(update={"workers": workers}))

    async def ready(self) -> tuple[str, int]:
        """Node and process, when the verifiers run."""
        await asyncio.to_thread(self._pool.start)
        return own_place()

    async def score(self, *pairs: tuple[str, str, str]) -> tuple[list[Verdict], tuple[str, int], int]:
        """Verdicts in order, node and process, and its failed starts so far. An argument for each pair, since Ray sends
        small ones along with the call. Raises RewardError."""
        return await self._pool.score_async(pairs), own_place(), self._pool.failed_starts

    async def counters(self) -> dict[str, int]:
        """Return what the pool did so far."""
        return self._pool.counters

    async def stop(self) -> None:
        """End the verifiers in order."""
        await asyncio.to_thread(self._pool.close)


def own_place() -> tuple[str, int]:
    """Return this actor's node and process."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


MAX_RESTARTS = 20
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
Make = Callable[[dict[str, Any], int], Any]
"""(options of the actor, number of the worker) -> handle. The actor has a coroutine `ready` that returns when it can
work, and serves many calls at once."""


@dataclass(eq=False)
class _Slot:
    """One worker. handle: None between two lives."""

    number: int
    name: str
    node: str
    handle: Any = None
    ready: bool = False
    under_way: int = 0
    restarts: int = 0
    reason: str = ""
    back: asyncio.Event = field(default_factory=asyncio.Event)


def alive_nodes() -> list[str]:
    """Ids of the nodes of the cluster, this process's own first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node != own, node))


class NodeWorkers:
    """The workers of one kind."""

    def __init__(self, kind: str, make: Make, run: RunContext) -> None:
        """`start` starts one on each node.

        Args:
            kind: what each is, for messages: "answer worker".
            make: starts one.
            run: its progress shows each loss; the deadline `workers_start` bounds each start.
        """
        self._kind, self._make = kind, make
        self._warn, self._deadlines = run.progress.warn, run.deadlines
        self._slots: list[_Slot] = []
        self._starts: set[asyncio.Task[None]] = set()
        self._listening: set[asyncio.Task[None]] = set()
        self._closed = False
        # One call is handed to Ray at a time, so that hundreds at once do not hold the event loop together.
        self._handing = asyncio.Lock()
        self.restarts = 0

    async def start(self, nodes: Sequence[str]) -> None:
        """Start one worker on each of these nodes (a node may be named several times) and wait for all.

        Raises:
            DaroError: one could not start. DeadlineError: it took too long.
        """
        self._slots = [_Slot(i, f"{self._kind} {i}", node) for i, node in enumerate(nodes)]
        for slot in self._slots:
            self._place(slot)
        ready = {slot.name: slot.handle.ready.remote() for slot in self._slots}
        await self._deadlines.within("workers_start", gather(ready), what=f"{len(ready)} x {self._kind}")
        for slot in self._slots:
            slot.ready = True
            slot.back.set()

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Return the result of one worker. When this is cancelled, the call is cancelled there.

        Args:
            timeout_s: after this the worker counts as hung: it is ended and started again. None: the caller has a
                deadline of its own.

        Raises:
            WorkerDiedError: the worker was lost with the call; call again. WorkerError: none is left, or the call
            failed. DaroError: what the worker raised on purpose.
        """
        async with self._handing:
            await asyncio.sleep(0)
            slot = await self._free()
            handle, slot.under_way = slot.handle, slot.under_way + 1
            reference = getattr(handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            reason = f"deadline '{method}': no result within {timeout_s:g} s"
            self._lost(slot, handle, reason)
            raise WorkerDiedError(f"{slot.name}: {reason}") from None
        except DEATHS as error:
            reason = str(translated(slot.name, error))
            self._lost(slot, handle, reason)
            raise WorkerDiedError(reason) from None
        except RayError as error:
            raise translated(slot.name, error) from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        finally:
            slot.under_way -= 1

    async def each(self, method: str) -> dict[str, Any]:
        """Return the results of every worker that is there now, by name."""
        there = [slot for slot in self._slots if slot.handle is not None]
        if not there:
            return {}
        results = await gather({slot.name: getattr(slot.handle, method).remote() for slot in there})
        return {slot.name: result for slot, result in zip(there, results, strict=True)}

    def listen(self, method: str, take: Callable[[Any], None]) -> None:
        """Has `take` called with each result of this call, which every worker is given again and again; it returns
        when there is something to tell."""
        self._listening |= {asyncio.create_task(self._listen(slot, method, take)) for slot in self._slots}

    async def _listen(self, slot: _Slot, method: str, take: Callable[[Any], None]) -> None:
        while slot in self._slots:
            await slot.back.wait()
            if (handle := slot.handle) is None:
                return  # it is left out
            try:
                result = await getattr(handle, method).remote()
            except RayError as error:
                self._lost(slot, handle, str(translated(slot.name, error)))
                continue
            take(result)

    def close(self) -> None:
        """End every process. May be called twice."""
        self._closed = True
        for task in (*self._starts, *self._listening):
            task.cancel()
        for slot in self._slots:
            self._end(slot)
        self._slots = []

    async def _free(self) -> _Slot:
        """Return the least busy worker that is ready, or the first that is again."""
        while True:
            if not self._slots:
                why = "they were not started, or are closed" if self._closed or not self.restarts else "all are lost"
                raise WorkerError(f"no {self._kind} is left: {why}")
            ready = [slot for slot in self._slots if slot.ready]
            if ready:
                return min(ready, key=lambda slot: slot.under_way)
            # Bounded: each start has its deadline and its number, and the last one that fails leaves none.
            waits = [asyncio.ensure_future(slot.back.wait()) for slot in self._slots]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def _place(self, slot: _Slot) -> None:
        # Not soft: Ray then places it anywhere. No CPU is asked for: the run's processes have them all.
        strategy = NodeAffinitySchedulingStrategy(node_id=slot.node, soft=False)
        slot.handle = self._make({"num_cpus": 0, "scheduling_strategy": strategy}, slot.number)

    def _lost(self, slot: _Slot, handle: object, reason: str) -> None:
        """End what is left of it and start it again, once for all whose calls it had."""
        if slot.handle is not handle or self._closed:
            return
        self._end(slot)
        slot.back.clear()
        slot.reason = reason
        task = asyncio.create_task(self._restart(slot))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _restart(self, slot: _Slot) -> None:
        """Until it works again, or was started too often; then it is left out."""
        while slot.restarts < MAX_RESTARTS:
            slot.restarts += 1
            self.restarts += 1
            self._warn(f"{slot.reason}. It is started again ({slot.restarts} of {MAX_RESTARTS} times)")
            await asyncio.sleep(backoff_s(slot.restarts - 1, first_s=_PAUSE_S, longest_s=_LONGEST_PAUSE_S))
            nodes = alive_nodes()
            if slot.node not in nodes:
                slot.node = nodes[slot.number % len(nodes)]
            self._place(slot)
            try:
                start = gather({slot.name: slot.handle.ready.remote()})
                await self._deadlines.within("workers_start", start, what=slot.name)
            except (WorkerError, DeadlineError) as error:
                slot.reason = str(error)
                self._end(slot)
                continue
            slot.ready = True
            slot.back.set()
            return
        self._warn(f"{slot.name} is not started again: it was {MAX_RESTARTS} times. The last time: {slot.reason}")
        self._slots.remove(slot)
        slot.back.set()

    def _end(self, slot: _Slot) -> None:
        handle, slot.handle, slot.ready = slot.handle, None, False
        if handle is not None:
            ray.kill(handle, no_restart=True)


_STOP_S = 30.0


class VerifierPools:
    """The verifiers of a run."""

    def __init__(self, run: RunContext) -> None:
        """`reward.workers` processes are dealt out to the nodes; where there is only one, and no
        servers, they belong to this process."""
        section = self._section = run.config.reward
        self._beside_driver = run.config.engine.kind == "embedded"
        self._shares: list[int] = []

        def make(options: dict[str, Any], number: int) -> ActorHandle:
            worker = actor_class(VerdictWorker).options(**options)
            return worker.remote(number, section, self._shares[number], run.log_dir)

        self.workers = NodeWorkers("verifier pool", make, run)
        self.pool: RewardPool | None = None
        self._started = False
        self._failed_starts: dict[tuple[str, int], int] = {}  # by node and process

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

    @property
    def failed_starts(self) -> int:
        """Starts of verifier processes that failed and were tried again, as far as pools have said it."""
        return self.pool.failed_starts if self.pool is not None else sum(self._failed_starts.values())

    async def score_async(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Verdicts of (answer text, gold answer, statement of the problem), in order.

        Raises:
            RewardError: a pool failed. WorkerError: all are lost, each after as many starts as are allowed.
        """
        if self.pool is not None:
            return await self.pool.score_async(pairs)
        while True:
            try:
                verdicts: list[Verdict]
                verdicts, place, failed_starts = await self.workers.call("score", *pairs)
                self._failed_starts[place] = failed_starts
                return verdicts
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
