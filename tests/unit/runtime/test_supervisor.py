"""What watches a run: the first that ends is the news, nothing goes on waiting afterwards, and the cause is named."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from megatron_daro.errors import EngineError, WorkerError
from megatron_daro.runtime.supervisor import WorkerDiedError, WorkerGroup, first_death, gather, supervised, translated


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


def test_an_error_of_a_worker_is_raised_as_it_is():
    own = EngineError("the model is not there")
    assert translated("engine 0", RayTaskError("start", "traceback", own)) is own
    other = translated("engine 0", RayTaskError("start", "traceback", KeyError("x")))
    assert type(other) is WorkerError and "engine 0" in str(other) and "KeyError: 'x'" in str(other)


class ToldError(RayActorError):
    """A death in Ray's words."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def __str__(self):
        return self.words


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ActorUnavailableError("unavailable", None), "connection"),
        (OutOfMemoryError("6 worker(s) were killed. " + "Top memory users " * 90), "memory"),
        (NodeDiedError("the node was lost"), "node"),
        (
            ToldError(
                "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainWorker\n\tpid: 4711\n"
                "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
                "detail: Worker unexpectedly exits with a connection error code 2. End of file. There are 3 potential "
                "root causes. (1) The process is killed by SIGKILL by OOM killer. (2) ray stop --force is called."
            ),
            "4711",
        ),
    ],
)
def test_a_death_is_told_in_a_line_with_who_died_and_how_and_without_rays_advice(error, cause):
    told = translated("engine 0", error)
    assert type(told) is WorkerDiedError and "engine 0" in str(told) and cause in str(told)
    assert len(str(told)) < 200 and "\n" not in str(told) and "ray stop" not in str(told)


def test_the_death_of_a_worker_is_told_before_what_the_others_say_of_it():
    async def says():
        raise WorkerError("rank 0: connection closed by peer")

    async def dies():
        await asyncio.sleep(0.05)
        raise ActorDiedError

    with pytest.raises(WorkerDiedError, match="rank 1"):
        asyncio.run(gather({"rank 0": says(), "rank 1": dies()}))
