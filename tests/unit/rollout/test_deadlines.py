"""No wait is for ever, and each names itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from pathlib import Path
from random import Random

import pytest
from loop_fakes import NEVER

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))

from virtual_loop import VirtualLoop, run

from megatron_daro.deadlines import Deadlines, first_cause, to_the_end
from megatron_daro.errors import DeadlineError, EngineError


def test_a_hang_is_named_and_cancelled():
    cancelled = []

    async def hang():
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(DeadlineError, match=r"'train'.*step 20.*trainer\.deadline_scale"):
        asyncio.run(Deadlines(train=0.01).within("train", hang(), what="step 20"))
    assert cancelled == [True]


def test_something_that_ignores_cancellation_is_left_behind():
    release = []

    async def stubborn():
        while not release:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0)

    async def go():
        with pytest.raises(DeadlineError, match="sync"):
            await Deadlines(sync=2.0).within("sync", stubborn())
        release.append(True)

    run(VirtualLoop(Random(0), deadline_s=60.0), go())


def test_cancelling_the_caller_cancels_what_it_waits_for():
    seen = []

    async def hang():
        try:
            await asyncio.sleep(NEVER)
        finally:
            seen.append("ended")

    async def go():
        task = asyncio.ensure_future(Deadlines().within("train", hang()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["ended"]

    asyncio.run(go())


def test_first_cause_is_the_innermost_error():
    inner = ExceptionGroup("inner", [EngineError("x"), ValueError("y")])
    assert str(first_cause(ExceptionGroup("outer", [inner]))) == "x"
    assert str(first_cause(ValueError("plain"))) == "plain"


def told_to_the_loop(scenario) -> list:
    """Run it, and give what the event loop was left to report."""
    told = []

    async def go():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
        await scenario()
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(go())
    return told


def test_work_goes_on_to_its_end_though_the_caller_is_cancelled():
    ended = []

    async def work():
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(True)
        return 3

    async def go(times):
        task = asyncio.ensure_future(to_the_end(work()))
        for _ in range(times):
            await asyncio.sleep(0)
            task.cancel()
        return await task

    assert asyncio.run(to_the_end(work())) == 3
    for times in (1, 3):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(go(times))
    assert ended == [True] * 3


def test_a_failure_of_work_that_goes_on_to_its_end_is_raised_or_the_cancellation_is():
    async def fails():
        for _ in range(3):
            await asyncio.sleep(0)
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        asyncio.run(to_the_end(fails()))

    async def scenario():
        task = asyncio.ensure_future(to_the_end(fails()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    assert told_to_the_loop(scenario) == []
