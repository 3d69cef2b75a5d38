"""Thousands of calls leave the event loop its turns; a cancelled wait for one ends, whatever it meets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megatron_daro.engine.sglang.fleet import Fleet
from megatron_daro.runtime import healing
from megatron_daro.runtime.sglang_group import RayServer
from megatron_daro.runtime.supervisor import gather, unhurried


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
        return [rank async for rank in unhurried(range(4096))]

    async def answers() -> None:
        async def answer(rank: int) -> int:
            return rank

        assert await gather([answer(rank) for rank in range(4096)]) == list(range(4096))

    assert asyncio.run(calls()) == list(range(4096))
    assert asyncio.run(turns_during(calls())) >= 100 and asyncio.run(turns_during(answers())) >= 100


def _server_call(call: asyncio.Future[int]) -> Coroutine[Any, Any, int]:
    return RayServer._call(RayServer.__new__(RayServer), call, 60)


async def _change(call: asyncio.Future[int]) -> None:
    fleet = Fleet.__new__(Fleet)
    fleet._changed = asyncio.Event()
    call.add_done_callback(lambda _: fleet._changed.set())
    await fleet._change(60)


@pytest.mark.parametrize("wait", [healing._answer, _server_call, _change])
def test_a_wait_that_is_cancelled_in_the_turn_of_its_answer_ends(wait: Callable[[Any], Coroutine[Any, Any, Any]]):
    """Python 3.11's `asyncio.wait_for` gives the answer then, and whoever cancelled waits for ever."""

    async def cancelled(turns: int) -> bool:
        call = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(wait(call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.set_result(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            return True  # the answer came first
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert all(asyncio.run(cancelled(turns)) for turns in range(4))
