"""What becomes of calls to Ray workers: all awaited, the first failure as an error of this package, a death as its end.

A group is a set of worker processes that belong together, Ray actor handles by name, ended together. Every worker has
one call that never returns; when it fails the worker is gone, unless its group was dismissed. Where nobody replaces it
(healing.py, embedded_group.py) the run ends within seconds, wherever the loop happens to wait. The message names the
worker and Ray's cause.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import UserDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_daro.deadlines import mark_as_seen
from megatron_daro.errors import DaroError, WorkerError
from megatron_daro.runtime.cluster import plain
from megatron_daro.runtime.ray_private import process_of

remote_class = cast(Callable[..., Callable[[type], type]], ray.remote)
"""`ray.remote` with options: its stubs know neither concurrency groups nor the limits of restarts."""
DEATHS = RayActorError, NodeDiedError, OutOfMemoryError
"""What a call to a process that is gone may raise; the last where Ray ended it (RAY_memory_usage_threshold)."""
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_IN_ONE_GO = 32
# What one worker says of a lost peer comes before Ray's own news of the death: at once where the peer's node lives,
# after its health checks where the node is gone.
_NEWS_S, _NEWS_OF_A_NODE_S = 3.0, 40.0


class ActorClass(Protocol):
    """What Ray makes of a decorated class."""

    def options(self, **options: object) -> ActorClass:
        """Return the class with options of placement, resources and restarts."""

    def remote(self, *arguments: object) -> ActorHandle:
        """Start an actor with these arguments of its constructor."""


def actor_class(decorated: type) -> ActorClass:
    """Return a class under `remote_class` as what it is: a type checker sees the class as it is written."""
    return cast(ActorClass, decorated)


async def yielding_to_event_loop(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """Yield the items, and let the event loop see to everything else after every few.

    A call to an actor costs its caller a few tenths of a millisecond: thousands of them in one go would keep answers of
    servers, signals and deaths of workers waiting for seconds.
    """
    for number, item in enumerate(items, 1):
        yield item
        if number % _IN_ONE_GO == 0:
            await asyncio.sleep(0)


async def gather(calls: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Results of calls that belong together; the first failure ends the wait for the others.

    Args:
        calls: Ray references, by worker name where a mapping.

    Raises:
        DaroError: what a worker raised on purpose. WorkerError: a worker died or failed otherwise.
    """
    named = calls if isinstance(calls, Mapping) else {f"worker {i}": call for i, call in enumerate(calls)}
    tasks: dict[asyncio.Task[Any], str] = {}
    try:
        async for name, call in yielding_to_event_loop(named.items()):
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
    """Return the calls that fail soon after the first: one of them may say that a process died, which is the cause."""
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
    except (RayError, GetTimeoutError) as error:
        raise translated(name, error) from None


def _worst_first(errors: Iterable[BaseException | None]) -> list[BaseException]:
    """Return a worker's death before what the others say of it (a lost peer, a collective that timed out)."""
    return sorted((e for e in errors if e is not None), key=lambda e: not getattr(e, "died", False))


class WorkerDiedError(WorkerError):
    """The process of a worker is gone."""

    died = True


def _how(text: str) -> str:
    """Ray's account of a death without its class names, addresses and advice: process, and what ended it."""
    line = " ".join(text.split())
    pid = re.search(r"\bpid: (\d+)", line)
    detail = re.search(r"Worker exit detail: (.*)", line)
    cause = plain(". ".join(detail.group(1).split(". ")[:2]) if detail else line)  # then come guesses at the cause
    return (f"process {pid.group(1)}: " if pid else "") + cause.rstrip(". ")


def translated(name: str, error: BaseException) -> DaroError:
    """Ray's error as one of this package: the worker's own DaroError where it raised one."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, DaroError):
            return cause
        # Its traceback is in the worker's own log.
        return WorkerError(f"{name} failed: {type(cause).__name__}: {plain(str(cause))}")
    if isinstance(error, DEATHS):
        how = _how(str(error))
        if isinstance(error, ActorUnavailableError | NodeDiedError):
            how = "Ray lost the connection to its process; its node may be gone"
        elif isinstance(error, OutOfMemoryError):
            how = "Ray ended its process because its node ran low on memory"
        return WorkerDiedError(f"{name} died: {how}")
    return WorkerError(f"{name}: {type(error).__name__}: {error}")


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


_LOOKS = 4
"""Looks at a silent process, `hung_s` in all, in which its CPU time must stand still before it counts as frozen."""


async def end_frozen(
    workers: Callable[[], Mapping[str, ActorHandle]],
    ask: Callable[[ActorHandle], Awaitable[object]],
    *,
    hung_s: float,
    warn: Callable[[str], None],
) -> None:
    """For ever: kill each process that neither answers nor uses the CPU for so long. Its death is noticed then as any
    other is. One that is slow, on a busy machine, uses a little of it; of a node that is silent Ray tells.

    Args:
        workers: returns those to look at, by name. ask: a call that a living process answers, whatever else it does.
        hung_s: seconds. warn: told of each.
    """
    watched: dict[str, ActorHandle] = {}

    async def watch(name: str, worker: ActorHandle) -> None:
        if await _freezes(worker, ask, hung_s / _LOOKS):
            warn(f"{name} has not answered for {hung_s:g} s: it is frozen, and is killed")
            ray.kill(worker, no_restart=True)

    async with asyncio.TaskGroup() as watches:
        while True:
            await asyncio.sleep(hung_s / _LOOKS)
            for name, worker in workers().items():
                if watched.get(name) is not worker:
                    watched[name] = worker
                    watches.create_task(watch(name, worker))


async def _freezes(worker: ActorHandle, ask: Callable[[ActorHandle], Awaitable[object]], pause_s: float) -> bool:
    """Wait until a process is frozen. False: it is gone. Args: ask: as `end_frozen` has it. pause_s: between looks."""
    while True:
        answer = asyncio.ensure_future(_lives(ask(worker)))
        try:
            used_s, still = math.nan, 0
            while not (await asyncio.wait({answer}, timeout=pause_s))[0]:
                before_s, used_s = used_s, await cpu_time(worker)
                still = still + 1 if used_s == before_s else 0
                if still == _LOOKS:
                    return True
        finally:
            answer.cancel()
        if not answer.result():
            return False
        await asyncio.sleep(pause_s)


async def _lives(call: Awaitable[object]) -> bool:
    """Whether a process answers, however late. False: it is gone."""
    try:
        await call
    except RayError:
        return False
    return True


async def cpu_time(worker: ActorHandle) -> float:
    """Return the CPU time of a worker's process so far, seconds; NaN, which equals nothing, where that is not known."""
    process = await asyncio.to_thread(process_of, worker)
    if process is None:
        return math.nan
    node_id, pid = process
    node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    try:
        return await _cpu_time.options(scheduling_strategy=node).remote(pid)
    except RayError:
        return math.nan


@ray.remote(num_cpus=0, max_retries=0)
def _cpu_time(pid: int) -> float:
    """Return the CPU time of a process of this node, to the nanosecond, where /proc has hundredths of a second.

    Source of the clock's number: clock_getcpuclockid(3).
    """
    return time.clock_gettime(~pid << 3 | 2)


T = TypeVar("T")


@runtime_checkable
class HasEnding(Protocol):
    """An engine that watches its own processes."""

    async def fatal_error(self) -> Exception:
        """Wait until it cannot go on, and return why."""
        ...


async def supervised(work: Awaitable[T], endings: Iterable[Awaitable[Exception]]) -> T:
    """Return the result of `work`, unless one of the endings comes first: then `work` is cancelled, and it is raised.

    Args:
        work: the controller's run; it closes what it holds when it is cancelled.
        endings: what may end the run: each returns its error.

    Raises:
        WorkerError: a worker's process ended while `work` was going on. Whatever `work` raises passes through.
    """
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(ending) for ending in endings]
    try:
        done, _ = await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            await _cancelled(task)
            raise next(watch for watch in watches if watch in done).result()
        return task.result()
    except asyncio.CancelledError:
        await _cancelled(task)
        raise
    finally:
        for watch in watches:
            watch.cancel()


async def _cancelled(task: asyncio.Future[T]) -> None:
    """Cancel and wait. Its error, a consequence of the one that is raised, counts as seen: asyncio would print it."""
    task.add_done_callback(mark_as_seen)
    task.cancel()
    await asyncio.wait({task})


async def death_of(name: str, worker: ActorHandle) -> DaroError:
    """Wait until the process of a worker is gone; return why."""
    try:
        await worker.sentinel.remote()
    except Exception as error:  # the supervisor's border: whatever ends a worker is the news
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
            await asyncio.Future()  # for ever: whoever waits here is cancelled when the work is done
        first = next(iter(done))
        return *watches[first], first.result()
    finally:
        for watch in watches:
            watch.cancel()
