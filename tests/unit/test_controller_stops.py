"""How a run is asked to stop: what is said, what is cancelled, and what is saved."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import NEVER, make_stack, run_stack

from megatron_daro.errors import DataError
from megatron_daro.recovery import step_directories


def test_a_stop_is_said_and_the_second_one_too_and_the_third_is_nothing(tmp_path):
    stack = make_stack(tmp_path)
    cancelled = []
    stack.controller._task = SimpleNamespace(cancel=lambda: cancelled.append(True))
    stack.controller.request_stop("SIGTERM")
    assert stack.progress.messages == ["SIGTERM: stopping with a checkpoint (once more to stop at once)"]
    assert not cancelled
    for _ in range(2):
        stack.controller.request_stop("SIGINT")
    assert stack.progress.messages[1:] == ["SIGINT again: stopping at once, without a checkpoint"]
    assert cancelled == [True]


def test_a_second_stop_before_the_run_is_nothing(tmp_path):
    stack = make_stack(tmp_path)
    for _ in range(2):
        stack.controller.request_stop("SIGTERM")
    assert len(stack.progress.messages) == 1


def test_a_stop_before_the_first_step_saves_nothing(tmp_path):
    stack = make_stack(tmp_path)
    stack.controller.request_stop("asked")
    outcome = run_stack(stack)
    assert (outcome.status, outcome.step) == ("stopped", 0) and stack.policy.steps == 0
    assert not step_directories(tmp_path / "checkpoints") and stack.policy.closed == 1


def test_work_that_a_stop_ends_is_cancelled_and_what_it_raised_is_raised(tmp_path):
    stack = make_stack(tmp_path)
    ended = []

    async def work():
        try:
            await asyncio.sleep(NEVER)
        finally:
            ended.append(True)

    async def fails():
        raise DataError("no")

    async def go():
        assert await stack.controller.unless_stopped(asyncio.sleep(0)) is True
        with pytest.raises(DataError, match="no"):
            await stack.controller.unless_stopped(fails())
        asyncio.get_running_loop().call_later(0.01, stack.controller.request_stop, "asked")
        assert await stack.controller.unless_stopped(work()) is False
        assert ended == [True]

    asyncio.run(go())


def test_a_run_that_is_cancelled_is_cancelled_and_closed(tmp_path):
    stack = make_stack(tmp_path)

    async def go():
        stack.policy.gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        async with asyncio.timeout(20):
            while ("train", 1) not in stack.events:
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait([run])
        return run.cancelled()

    assert asyncio.run(go()) is True
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)
