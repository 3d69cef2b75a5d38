"""What ends a run: the first that ends is the news, and nothing goes on waiting afterwards."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from megatron_daro.runtime.launch import supervised
from megatron_daro.runtime.ray_calls import WorkerDiedError
from megatron_daro.runtime.worker_group import WorkerGroup, first_death


@pytest.mark.parametrize("dies", [True, False])
def test_nothing_watches_on_when_the_run_has_ended(dies):
    async def endless():
        await asyncio.Future()

    async def ended():
        return OSError("gone")

    async def run():
        endings = [endless(), endless(), *([ended()] if dies else [])]
        work = endless() if dies else asyncio.sleep(0.01, "done")
        try:
            return await supervised(work, endings)
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    if dies:
        with pytest.raises(OSError, match="gone"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == "done"


class Watched:
    """A worker whose sentinel ends as told."""

    def __init__(self):
        self.end = asyncio.get_running_loop().create_future()
        self.sentinel = SimpleNamespace(remote=lambda: self.end)


def group_of(*names):
    group = WorkerGroup()
    group.update({name: Watched() for name in names})
    return group


async def death_in(group):
    _, _, error = await first_death(group)
    return error


async def closing(closed):
    """Work that goes on for ever, and takes a turn to close what it holds; what fails then is a consequence."""
    try:
        await asyncio.Future()
    finally:
        await asyncio.sleep(0)
        closed.append("closed")
        raise OSError("a consequence")


def test_the_death_of_a_worker_of_any_group_ends_the_run_after_it_has_closed():
    closed = []

    async def run():
        groups = [group_of("engine 0"), group_of("actor rank 0", "actor rank 1")]
        task = asyncio.ensure_future(supervised(closing(closed), map(death_in, groups)))
        for _ in range(5):
            await asyncio.sleep(0)
        groups[1]["actor rank 1"].end.set_exception(ActorDiedError())
        await task

    with pytest.raises(WorkerDiedError, match="actor rank 1"):
        asyncio.run(run())
    assert closed == ["closed"]


def test_the_end_of_a_worker_that_was_dismissed_does_not_end_the_run():
    async def run():
        group, go_on = group_of("a", "b"), asyncio.Event()
        task = asyncio.ensure_future(supervised(go_on.wait(), [death_in(group)]))
        for _ in range(5):
            await asyncio.sleep(0)
        group.dismissed = True
        group["a"].end.set_exception(ActorDiedError())
        for _ in range(5):
            await asyncio.sleep(0)
        go_on.set()
        return await task

    assert asyncio.run(run())


def test_a_run_that_is_cancelled_closes_before_it_ends():
    closed = []

    async def run():
        task = asyncio.ensure_future(supervised(closing(closed), []))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and closed == ["closed"]

    asyncio.run(run())
