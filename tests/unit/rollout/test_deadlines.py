"""No wait is for ever, and each names itself."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import fields

import pytest
from loop_fakes import NEVER

from megatron_daro.errors import DeadlineError, EngineError
from megatron_daro.rollout import deadlines as module
from megatron_daro.rollout.deadlines import Deadlines, first_cause


def test_a_hang_is_named_and_cancelled():
    cancelled = []

    async def hang():
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(
        DeadlineError, match=r"deadline 'train' \(step 20\): not done after 0.01 s.*trainer.deadline_scale"
    ):
        asyncio.run(Deadlines(train=0.01).within("train", hang(), what="step 20"))
    assert cancelled == [True]


def test_something_that_ignores_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 0.01)
    release = []

    async def stubborn():
        while not release:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def go():
        with pytest.raises(DeadlineError, match="deadline 'sync'"):
            await Deadlines(sync=0.01).within("sync", stubborn())
        release.append(True)

    asyncio.run(go())


def test_results_and_errors_pass_through():
    async def value():
        return 3

    async def fail():
        raise EngineError("gone")

    assert asyncio.run(Deadlines().within("score", value())) == 3
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(Deadlines().within("score", fail()))


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


def test_a_scale_multiplies_every_limit():
    assert Deadlines().scaled(2.0) == Deadlines(**{f.name: 2 * getattr(Deadlines(), f.name) for f in fields(Deadlines)})
