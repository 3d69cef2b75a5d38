"""Thousands of calls leave the event loop its turns, and of those that fail the cause is named."""

from __future__ import annotations

import asyncio

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
from megatron_daro.runtime.ray_calls import WorkerDiedError, gather, translated, yielding_to_event_loop


async def turns_during(work) -> int:
    """How often another coroutine had a turn."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await asyncio.sleep(0)
    before = turns
    await work
    beside.cancel()
    return turns - before


def test_calls_to_thousands_of_ranks_are_made_in_many_turns():
    async def calls() -> list[int]:
        return [rank async for rank in yielding_to_event_loop(range(4096))]

    async def answers() -> None:
        async def answer(rank: int) -> int:
            return rank

        assert await gather({f"rank {rank}": answer(rank) for rank in range(4096)}) == list(range(4096))

    assert asyncio.run(calls()) == list(range(4096))
    assert asyncio.run(turns_during(calls())) >= 100 and asyncio.run(turns_during(answers())) >= 100


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
