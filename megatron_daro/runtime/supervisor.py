"""Ends the run when a worker process dies, with the cause, within seconds and wherever the loop happens to wait.

Every worker has one call that never returns; when it fails the worker is gone, unless its group was dismissed. A
group is a set of worker processes that belong together, Ray actor handles by name, ended together; policy_group.py
and engine_group.py own one each.
"""

from __future__ import annotations

import asyncio
from collections import UserDict
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import ray

from megatron_daro.runtime.calls import translated, unhurried


class WorkerGroup(UserDict[str, Any]):
    """Handles by name. `dismissed` tells the supervisor that the end of a process is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.dismissed = False

    def dismiss(self) -> None:
        """End every process. May be called twice."""
        self.dismissed = True
        for worker in self.data.values():
            ray.kill(worker, no_restart=True)
        self.data.clear()


T = TypeVar("T")


@runtime_checkable
class HasEnding(Protocol):
    """An engine that watches its own processes."""

    async def ended(self) -> Exception:
        """Wait until it cannot go on, and return why."""
        ...


async def supervised(
    work: Awaitable[T], groups: Sequence[WorkerGroup], endings: Sequence[Awaitable[Exception]] = ()
) -> T:
    """Return the result of `work`, unless a worker dies first: then `work` is cancelled and the death is raised.

    Args:
        work: the controller's run; it closes what it holds when it is cancelled.
        groups: the workers to watch.
        endings: further things that may end the run: each returns its error.

    Raises:
        WorkerError: a worker's process ended while `work` was going on. Whatever `work` raises passes through.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_first_death(groups, endings))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not task.done():
            await _cancelled(task)
            raise watch.result()
        return task.result()
    except asyncio.CancelledError:
        await _cancelled(task)
        raise
    finally:
        watch.cancel()


async def _cancelled(task: asyncio.Future[T]) -> None:
    """Cancel and wait. Its error, a consequence of the one that is raised, counts as seen: asyncio would print it."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _first_death(groups: Sequence[WorkerGroup], endings: Sequence[Awaitable[Exception]]) -> Exception:
    """Wait until a worker of a group that was not dismissed is gone; return the error."""
    watches = [asyncio.ensure_future(ending) for ending in endings]
    try:
        async for group, name in unhurried([(one, name) for one in groups for name in one]):
            watches.append(asyncio.ensure_future(_death(group, name, group[name].sentinel.remote())))
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for watch in watches:
            watch.cancel()


async def _death(group: WorkerGroup, name: str, sentinel: Awaitable[None]) -> Exception:
    try:
        await sentinel
        error: Exception = RuntimeError("its sentinel returned")
    except Exception as raised:  # the supervisor's border: whatever ends a worker is the news
        error = raised
    if group.dismissed:
        await asyncio.Future()  # for ever: whoever waits here is cancelled when the work is done
    return translated(name, error)
