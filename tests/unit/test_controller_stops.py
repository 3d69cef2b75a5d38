"""How a run is asked to stop: what is said, what is cancelled, what is saved, and what the resumed run is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books, files_of
from loop_fakes import Crash, make_stack, resume_stack, run_stack

from megatron_daro.checkpoints import find_latest_valid, step_directories
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.runtime.interrupts import stop_on_signals


def test_a_stop_before_the_first_step_saves_nothing(tmp_path):
    stack = make_stack(tmp_path)
    stack.controller.request_stop("asked")
    outcome = run_stack(stack)
    assert (outcome.status, outcome.step) == ("stopped", 0) and stack.policy.steps == 0
    assert not step_directories(tmp_path / "checkpoints") and stack.policy.closed == 1


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


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("where", ["generating", "training"])
def test_ctrl_c_ends_with_a_checkpoint_and_the_resumed_run_is_the_same(tmp_path, where, staleness):
    whole = make_stack(tmp_path / "whole", rollout={"max_staleness": staleness}, trainer={"save_every_steps": 0})
    run_stack(whole)
    stack = make_stack(tmp_path / "cut", rollout={"max_staleness": staleness}, trainer={"save_every_steps": 0})
    watched = "generate" if where == "generating" else "train"

    async def go():
        run = asyncio.ensure_future(stack.controller.run())
        while (watched, 3) not in stack.events:
            await asyncio.sleep(0)
        with stop_on_signals(stack.controller):
            os.kill(os.getpid(), signal.SIGINT)
            return await run

    outcome = asyncio.run(go())
    assert outcome.status == "stopped" and 3 <= outcome.step < 6
    assert find_latest_valid(stack.run, stack.progress)[1]["step"] == outcome.step
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)
    resumed = make_stack(tmp_path / "cut", rollout={"max_staleness": staleness})
    assert resume_stack(resumed).status == "finished"
    if staleness == 0:
        assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
        assert resumed.policy.weights == whole.policy.weights
    check_books(tmp_path / "cut")


def test_ctrl_c_does_not_wait_for_the_generation(tmp_path):
    stack = make_stack(tmp_path, trainer={"save_every_steps": 0})

    async def go():
        stack.engine.gate = asyncio.Event()
        stack.engine.gate.set()
        run = asyncio.ensure_future(stack.controller.run())
        while ("trained", 2) not in stack.events:
            await asyncio.sleep(0)
        stack.engine.gate.clear()  # From here on no group is ever completed.
        while ("generate", 2) not in stack.events:
            await asyncio.sleep(0)
        stack.controller.request_stop("SIGINT")
        return await run

    outcome = asyncio.run(go())
    assert (outcome.status, outcome.step) == ("stopped", 2)
    assert stack.events[-1] == ("save", 2) and ("generated", 2) in stack.events
    assert stack.engine.iterators_closed == len(stack.engine.requests)
    assert find_latest_valid(tmp_path, stack.progress)[1]["step"] == 2


def test_skipped_steps_are_still_counted_after_a_resume(tmp_path):
    def make(run, crash=None):
        stack = make_stack(run, crash=crash, trainer={"on_nonfinite": "skip"})
        stack.policy.nonfinite_steps = {1: "skip", 6: "raise"}
        return stack

    with pytest.raises(Crash):
        run_stack(make(tmp_path / "cut", crash=("train", 5, "enter")))
    resume_stack(make(tmp_path / "cut"))
    run_stack(make(tmp_path / "whole"))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    assert [line["rollout/steps_skipped"] for line in read_metrics(tmp_path / "cut")] == [1, 1, 1, 1, 1, 2]


def test_the_second_ctrl_c_stops_at_once(tmp_path):
    stack = make_stack(tmp_path)

    async def go():
        stack.policy.gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        while ("train", 1) not in stack.events:
            await asyncio.sleep(0)
        with stop_on_signals(stack.controller):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(50):
                await asyncio.sleep(0)
            assert not run.done()
            os.kill(os.getpid(), signal.SIGINT)
            return await run

    outcome = asyncio.run(go())
    assert (outcome.status, outcome.step) == ("interrupted", 0)
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)
    assert not step_directories(tmp_path / "checkpoints")
