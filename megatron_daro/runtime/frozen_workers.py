"""Kills frozen processes: the death of a process is noticed by others, a freeze is not."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_daro.runtime.ray_private import process_of

_LOOKS = 4
"""How often a silent process is looked at within `hung_s`; its CPU time must stand still throughout to count as
frozen."""


async def end_frozen(
    workers: Callable[[], Mapping[str, ActorHandle]],
    ask: Callable[[ActorHandle], Awaitable[object]],
    *,
    hung_s: float,
    warn: Callable[[str], None],
) -> None:
    """For ever, kill each process that neither answers nor uses the CPU for `hung_s`. Its death is then noticed like
    any other. A process that is only slow, on a busy machine, still uses some CPU; Ray itself reports nodes that are
    silent.

    Args:
        workers: returns the workers to watch, by name. ask: a call that a living process answers, whatever else it
            does.
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
    """Wait until a process is frozen, and return True; return False once it is gone. Args: ask: see `end_frozen`.
    pause_s: between looks."""
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
    """Wait until a process answers, however late, and return True; return False if it is gone."""
    try:
        await call
    except RayError:
        return False
    return True


async def cpu_time(worker: ActorHandle) -> float:
    """Return the CPU time of a worker's process so far, seconds; NaN, which equals nothing, if it is not known."""
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
    """Return the CPU time of a process of this node, to the nanosecond; /proc only has hundredths of a second.

    Source of the clock's number: clock_getcpuclockid(3).
    """
    return time.clock_gettime(~pid << 3 | 2)
