"""Calls to Ray actors: typed classes of actors, many calls at once, and Ray's errors as errors of this package.

Of calls that belong together the first failure is raised; if a process died, its death is raised as the cause, where it
is known by then or soon after a WorkerError of another. The message names the worker and Ray's cause.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from megatron_daro.errors import DaroError, WorkerError
from megatron_daro.runtime.cluster import plain

remote_class = cast(Callable[..., Callable[[type], type]], ray.remote)
"""`ray.remote` with options: its stubs know neither concurrency groups nor the limits of restarts."""
DEATHS = RayActorError, NodeDiedError, OutOfMemoryError
"""What a call to a process that is gone may raise; the last one if Ray killed it for lack of memory
(RAY_memory_usage_threshold)."""
_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_IN_ONE_GO = 32
# A worker's error about a lost peer comes before Ray's own report of the death, which follows at once if the peer's
# node lives, and after health checks if the node is gone.
_NEWS_S, _NEWS_OF_A_NODE_S = 3.0, 40.0


class ActorClass(Protocol):
    """What Ray makes of a decorated class."""

    def options(self, **options: object) -> ActorClass:
        """Return the class with options of placement, resources and restarts."""

    def remote(self, *arguments: object) -> ActorHandle:
        """Start an actor with these arguments of its constructor."""


def actor_class(decorated: type) -> ActorClass:
    """Return a class decorated with `remote_class` under its real type: a type checker sees the undecorated class."""
    return cast(ActorClass, decorated)


async def yielding_to_event_loop(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """Yield the items, and let the event loop do its other work after every few.

    A call to an actor costs its caller a few tenths of a millisecond: thousands of them in one go would keep answers of
    servers, signals and deaths of workers waiting for seconds.
    """
    for number, item in enumerate(items, 1):
        yield item
        if number % _IN_ONE_GO == 0:
            await asyncio.sleep(0)


async def gather(calls: Mapping[str, Any]) -> list[Any]:
    """Return the results of calls that belong together; the first failure ends the wait for the others.

    Args:
        calls: Ray references, by worker name.

    Raises:
        DaroError: what a worker raised on purpose. WorkerError: a worker died or failed otherwise.
    """
    tasks: dict[asyncio.Task[Any], str] = {}
    try:
        async for name, call in yielding_to_event_loop(calls.items()):
            tasks[asyncio.ensure_future(_one(name, call))] = name
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        done |= await _news(done, pending)
        for failed in _worst_first(task.exception() for task in done):
            raise failed
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _news(done: set[asyncio.Task[_Result]], pending: set[asyncio.Task[_Result]]) -> set[asyncio.Task[_Result]]:
    """Return the calls that end soon after the first failure: one of them may report that a process died, which is the
    cause."""
    if not any(type(task.exception()) is WorkerError for task in done) or any(map(_died, done)):
        return set()
    loop, later = asyncio.get_running_loop(), set[asyncio.Task[_Result]]()
    nodes = sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1
    end = loop.time() + (_NEWS_S if nodes < 2 else _NEWS_OF_A_NODE_S)
    while pending and not any(map(_died, later)) and (remaining_s := end - loop.time()) > 0:
        ended, pending = await asyncio.wait(pending, timeout=remaining_s, return_when=asyncio.FIRST_EXCEPTION)
        later |= ended
    return later


def _died(task: asyncio.Task[_Result]) -> bool:
    return getattr(task.exception(), "died", False)


async def _one(name: str, call: Awaitable[_Result]) -> _Result:
    try:
        return await call
    except RayError as error:
        raise translated(name, error) from None


def _worst_first(errors: Iterable[BaseException | None]) -> list[BaseException]:
    """Return the errors, a worker's death before what the others report of it (a lost peer, a collective that timed
    out)."""
    return sorted((e for e in errors if e is not None), key=lambda e: not getattr(e, "died", False))


class WorkerDiedError(WorkerError):
    """The process of a worker is gone."""

    died = True


def _how(text: str) -> str:
    """Return Ray's account of a death without its class names, addresses and advice: process, and what ended it."""
    line = " ".join(text.split())
    pid = re.search(r"\bpid: (\d+)", line)
    detail = re.search(r"Worker exit detail: (.*)", line)
    cause = plain(". ".join(detail.group(1).split(". ")[:2]) if detail else line)  # then come guesses at the cause
    return (f"process {pid.group(1)}: " if pid else "") + cause.rstrip(". ")


def translated(name: str, error: BaseException) -> DaroError:
    """Return Ray's error as one of this package: the worker's own DaroError if it raised one."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, DaroError):
            return cause
        _LOG.info("%s failed: %s", name, error)  # with the worker's traceback, for the driver's log
        return WorkerError(f"{name} failed: {type(cause).__name__}: {plain(str(cause))}")
    if isinstance(error, DEATHS):
        how = _how(str(error))
        if isinstance(error, ActorUnavailableError | NodeDiedError):
            how = "Ray lost the connection to its process; its node may be gone"
        elif isinstance(error, OutOfMemoryError):
            how = "Ray ended its process because its node ran low on memory"
        return WorkerDiedError(f"{name} died: {how}")
    return WorkerError(f"{name}: {type(error).__name__}: {error}")
