"""Calls that pass from one event loop to another: in order, a few at a turn, and none is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from megatron_daro.rollout.loop_calls import LoopCalls


def test_what_is_posted_together_wakes_the_other_loop_once():
    woken, later = [], []
    source = SimpleNamespace(call_later=lambda delay, function: later.append((delay, function)))
    target = SimpleNamespace(call_soon_threadsafe=woken.append, call_soon=woken.append)
    calls, seen = LoopCalls(source, target), []
    calls.post(seen.append, 1)
    calls.post(seen.extend, (2, 3))
    ((delay, wake),) = later
    assert delay == 0.002 and seen == woken == []
    wake()
    (run,) = woken
    run()
    assert seen == [1, 2, 3] and len(woken) == 1
    calls.post(seen.append, 4)
    assert len(later) == 2, "what is posted after that wakes it again"


def test_thirty_two_at_a_turn_and_in_order():
    async def go():
        loop, seen, turn = asyncio.get_running_loop(), [], 0
        calls = LoopCalls(loop, loop)
        for number in range(70):
            calls.post(lambda number: seen.append((number, turn)), number)
        while len(seen) < 70:
            await asyncio.sleep(0)
            turn += 1
        return seen

    seen = asyncio.run(go())
    turns = [turn for _, turn in seen]
    assert [number for number, _ in seen] == list(range(70))
    assert sorted(turns.count(turn) for turn in set(turns)) == [6, 32, 32]


def test_a_call_that_is_posted_by_a_call_is_made_too():
    async def go():
        loop, seen = asyncio.get_running_loop(), []
        calls = LoopCalls(loop, loop)

        def first():
            seen.append(1)
            calls.post(seen.append, 2)

        calls.post(first)
        async with asyncio.timeout(10):
            while len(seen) < 2:
                await asyncio.sleep(0.001)
        return seen

    assert asyncio.run(go()) == [1, 2]


def test_a_call_that_fails_does_not_keep_the_others_from_being_made():
    async def go():
        loop, seen, told = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda loop, context: told.append(context["exception"]))
        calls = LoopCalls(loop, loop)
        calls.post(int, "x")
        calls.post(seen.append, 1)
        async with asyncio.timeout(10):
            while not seen:
                await asyncio.sleep(0.001)
        return [type(error) for error in told]

    assert asyncio.run(go()) == [ValueError]


def test_a_loop_that_is_closed_is_not_called():
    closed = asyncio.new_event_loop()
    closed.close()

    async def go():
        told, loop = [], asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context))
        LoopCalls(loop, closed).post(print)
        await asyncio.sleep(0.01)
        return told

    assert asyncio.run(go()) == []
