"""Worker processes that belong together, and how the death of one is noticed.

Every worker has a call that never returns, `sentinel`; when it fails, the process is gone. If the process is not
replaced (healing.py, embedded_engines.py), `supervised` (launch.py) ends the run within seconds, wherever the loop
happens to wait.
"""

from __future__ import annotations

import asyncio
from collections import UserDict
from typing import Any

import ray
from ray.actor import ActorHandle

from megatron_daro.errors import DaroError
from megatron_daro.runtime.ray_calls import WorkerDiedError, translated, yielding_to_event_loop


class WorkerGroup(UserDict[str, Any]):
    """Handles by name. `dismissed`: whether the processes are being ended on purpose, so that a death is not
    reported."""

    def __init__(self) -> None:
        super().__init__()
        self.dismissed = False

    def dismiss(self) -> None:
        """End every process. May be called twice."""
        self.dismissed = True
        for worker in self.data.values():
            ray.kill(worker, no_restart=True)
        self.data.clear()


async def death_of(name: str, worker: ActorHandle) -> DaroError:
    """Wait until the process of a worker is gone; return why."""
    try:
        await worker.sentinel.remote()
    except Exception as error:  # the supervisor's border: whatever ends a worker is reported
        return translated(name, error)
    return WorkerDiedError(f"{name} died: its process has ended")


async def first_death(workers: WorkerGroup) -> tuple[str, ActorHandle, DaroError]:
    """Wait until a process of a group that was not dismissed is gone; return its name, its handle and the error."""
    watches: dict[asyncio.Task[DaroError], tuple[str, ActorHandle]] = {}
    try:
        async for name, worker in yielding_to_event_loop(dict(workers).items()):
            watches[asyncio.ensure_future(death_of(name, worker))] = name, worker
        if not workers.dismissed:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        if workers.dismissed:
            await asyncio.Future()  # for ever: the task that waits here is cancelled when the work is done
        first = next(iter(done))
        return *watches[first], first.result()
    finally:
        for watch in watches:
            watch.cancel()
