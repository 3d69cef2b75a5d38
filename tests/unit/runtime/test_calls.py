"""Thousands of calls leave the event loop its turns."""

from __future__ import annotations

import asyncio

from megatron_daro.runtime.supervisor import gather, yielding_to_event_loop


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

        assert await gather([answer(rank) for rank in range(4096)]) == list(range(4096))

    assert asyncio.run(calls()) == list(range(4096))
    assert asyncio.run(turns_during(calls())) >= 100 and asyncio.run(turns_during(answers())) >= 100
