"""No wait is for ever, and each names itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from dataclasses import asdict, fields

import pytest
from loop_fakes import NEVER

from megatron_daro.errors import DeadlineError, EngineError
from megatron_daro.rollout import deadlines as module
from megatron_daro.rollout.deadlines import Deadlines, first_cause, to_the_end


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


def test_the_limits_are_minutes_and_hours():
    minutes = {
        "placement": 10, "policy_start": 60, "verifier_start": 10, "engine_start": 30, "workers_start": 5,
        "generate": 120, "abort": 1, "score": 10, "engine_free": 240, "turn": 480, "batch": 480, "build": 10,
        "logprob": 240, "train": 240, "sync": 30, "memory": 30, "evaluate": 240, "write": 10, "save": 60, "load": 60,
        "heal": 60, "export": 120, "close": 1,
    }  # fmt: skip
    assert asdict(Deadlines()) == {name: 60.0 * limit for name, limit in minutes.items()} and module._GRACE_S == 5.0


def test_a_wait_without_details_has_no_brackets():
    with pytest.raises(DeadlineError, match=r"^deadline 'sync': not done after 0 s\."):
        asyncio.run(Deadlines(sync=0.0).within("sync", asyncio.sleep(NEVER)))


async def fails_when_cancelled():
    try:
        await asyncio.sleep(NEVER)
    except asyncio.CancelledError:
        raise ValueError("while it was cancelled") from None


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


def test_what_fails_while_it_is_cancelled_is_told_by_nobody_else():
    async def scenario():
        with pytest.raises(DeadlineError):
            await Deadlines(sync=0.001).within("sync", fails_when_cancelled())

    assert told_to_the_loop(scenario) == []


@pytest.mark.parametrize("cancellations", [1, 2])
def test_nor_what_fails_after_nobody_waits_for_it_any_more(monkeypatch, cancellations):
    """It takes longer than the grace, or the wait for that is cancelled as well (a second Ctrl-C)."""
    monkeypatch.setattr(module, "_GRACE_S", 0.01 if cancellations == 1 else NEVER)
    ended = []

    async def fails_late():
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            ended.append(True)
            raise ValueError("while it was cancelled") from None

    async def scenario():
        waits = asyncio.create_task(Deadlines().within("sync", fails_late()))
        for _ in range(cancellations):
            await asyncio.sleep(0.01)
            waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not ended
        await asyncio.sleep(0.2)
        assert ended

    assert told_to_the_loop(scenario) == []


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


def test_work_that_was_cancelled_itself_is_a_cancellation():
    async def scenario():
        inner = asyncio.ensure_future(asyncio.sleep(NEVER))
        task = asyncio.ensure_future(to_the_end(inner))
        await asyncio.sleep(0)
        task.cancel("by the caller")
        await asyncio.sleep(0)
        inner.cancel()
        with pytest.raises(asyncio.CancelledError, match="by the caller"):
            await task

    assert told_to_the_loop(scenario) == []
