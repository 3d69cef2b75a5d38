"""Equal Ray actors spread over the nodes: answer workers (answer_workers.py), pools of verifiers and of environments
(node_pools.py).

A call goes to the least busy worker of its kind. Unlike the policy's ranks, workers hold nothing that a run needs, so
the run outlives them: if one is lost, its callers get WorkerDiedError and call again, while it is restarted, at most
`MAX_RESTARTS` times. The actors are thin shells, and not in train_worker.py, because a process that imports no torch
starts in a fifth of the time and takes a quarter of the memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_daro.backoff import backoff_s
from megatron_daro.errors import DaroError, WorkerError
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.ray_calls import DEATHS, WorkerDiedError, gather, translated

MANY_CALLS = 100_000
"""How many calls an asynchronous actor may have under way: all groups of a large batch may wait in it for their
servers."""


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
    """One worker. handle: None while it has no process."""

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
    """Return the ids of the cluster's living nodes, this process's own first."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node != own, node))


class NodeWorkers:
    """The workers of one kind."""

    def __init__(self, kind: str, make: Make, run: RunContext, *, deadline: str = "workers_start") -> None:
        """Start nothing; `start` does.

        Args:
            kind: what each is, for messages: "answer worker".
            make: starts one.
            run: its progress shows each loss. deadline: that of each start.
        """
        self._kind, self._make = kind, make
        self._warn, self._deadlines, self._deadline = run.progress.warn, run.deadlines, deadline
        self._slots: list[_Slot] = []
        self._starts: set[asyncio.Task[None]] = set()
        self._listening: set[asyncio.Task[None]] = set()
        self._closed = False
        # Calls are handed to Ray one at a time, so that hundreds at once do not hold up the event loop.
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
        await self._deadlines.within(self._deadline, gather(ready), what=f"{len(ready)} x {self._kind}")
        for slot in self._slots:
            slot.ready = True
            slot.back.set()

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Call a method of the least busy worker, and return its result. When this is cancelled, so is the worker's
        call.

        Args:
            timeout_s: after this the worker counts as hung, and is killed and restarted. None: the caller has a
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

    def listen(self, method: str, take: Callable[[Any], None]) -> None:
        """Call a method of every worker again and again, and call `take` with each result. The method returns when it
        has something to report."""
        self._listening |= {asyncio.create_task(self._listen(slot, method, take)) for slot in self._slots}

    async def _listen(self, slot: _Slot, method: str, take: Callable[[Any], None]) -> None:
        while slot in self._slots:
            await slot.back.wait()
            if (handle := slot.handle) is None:
                return  # the worker was given up
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
        """Return the least busy worker that is ready; if none is, wait for the first."""
        while True:
            if not self._slots:
                why = "they were not started, or are closed" if self._closed or not self.restarts else "all are lost"
                raise WorkerError(f"no {self._kind} is left: {why}")
            ready = [slot for slot in self._slots if slot.ready]
            if ready:
                return min(ready, key=lambda slot: slot.under_way)
            # Bounded: starts have a deadline and are limited in number; when the last one has failed, no worker is
            # left.
            waits = [asyncio.ensure_future(slot.back.wait()) for slot in self._slots]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def _place(self, slot: _Slot) -> None:
        # Not soft: Ray would then place it anywhere. It asks for no CPU: the run's processes have them all.
        strategy = NodeAffinitySchedulingStrategy(node_id=slot.node, soft=False)
        slot.handle = self._make({"num_cpus": 0, "scheduling_strategy": strategy}, slot.number)

    def _lost(self, slot: _Slot, handle: object, reason: str) -> None:
        """Kill what is left of a worker and restart it, once however many calls it had."""
        if slot.handle is not handle or self._closed:
            return
        self._end(slot)
        slot.back.clear()
        slot.reason = reason
        task = asyncio.create_task(self._restart(slot))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _restart(self, slot: _Slot) -> None:
        """Start a worker until it works again; give it up after too many starts."""
        while slot.restarts < MAX_RESTARTS:
            slot.restarts += 1
            self.restarts += 1
            self._warn(f"{slot.reason}. It is started again ({slot.restarts} of {MAX_RESTARTS} times)")
            await asyncio.sleep(backoff_s(slot.restarts - 1, first_s=_PAUSE_S, longest_s=_LONGEST_PAUSE_S))
            try:
                nodes = alive_nodes()
                if slot.node not in nodes:
                    slot.node = nodes[slot.number % len(nodes)]
                self._place(slot)
                start = gather({slot.name: slot.handle.ready.remote()})
                await self._deadlines.within(self._deadline, start, what=slot.name)
            except (DaroError, RayError) as error:  # also the worker's own: verifiers that cannot start, no tokenizer
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
