"""Checkpoints of the loop: when they are written, what is in them, and what a resumed run takes from them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import make_stack, resume_stack, run_stack

from megatron_daro.errors import CheckpointError
from megatron_daro.recovery import STATE_FORMAT, find_latest_valid, step_directories


def test_the_state_of_a_checkpoint(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 3, "on_nonfinite": "skip"})
    stack.policy.nonfinite_steps = {2: "skip"}
    train = stack.policy.train

    async def more(batch, step):
        result = await train(batch, step)
        odd = {"difficulty/weight/1": float("nan"), "difficulty/other": 1.0}
        return replace(result, metrics={**result.metrics, **odd})

    stack.policy.train = more
    run_stack(stack)
    _, state = find_latest_valid(tmp_path, stack.progress)
    assert (state["format"], state["step"], state["batches_done"], state["skipped_steps"]) == (STATE_FORMAT, 3, 3, 1)
    assert list(state["difficulty_weights"]) == ["difficulty/weight/2"] and state["identity"] == {"seed": 1}


def test_a_resumed_run_goes_on_with_the_counts_and_saves_nothing_twice(tmp_path):
    run_stack(make_stack(tmp_path, trainer={"steps": 4, "updates_per_batch": 2}))
    again = make_stack(tmp_path, trainer={"steps": 4, "updates_per_batch": 2})
    saved = step_directories(tmp_path / "checkpoints")[0]
    before = saved.stat().st_ino
    resume_stack(again)
    controller = again.controller
    assert (controller.step, controller._batches_done, controller._skipped_steps) == (4, 2, 0)
    assert controller._planned_step == 4 and "difficulty/weight/2" in controller._weights
    assert saved.stat().st_ino == before and not any(event[0] == "save" for event in again.events)


def test_files_are_taken_back_to_the_step_of_the_checkpoint(tmp_path):
    taken = []
    stack = make_stack(tmp_path)
    note = SimpleNamespace(truncate_after=taken.append)
    stack.controller._parts = replace(stack.parts, metrics=note, recorder=note)
    stack.controller.truncate_files()
    stack.controller.step = 3
    stack.controller.truncate_files()
    assert taken == [-1, 0, 3, 3]


def test_steps_that_are_saved_are_multiples_of_the_distance(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 5, "save_every_steps": 2, "keep_checkpoints": 2})
    saved = []
    save = stack.parts.checkpoints.save

    async def noted_save(step, *others):
        saved.append(step)
        return await save(step, *others)

    stack.parts.checkpoints.save = noted_save
    run_stack(stack)
    assert saved == [2, 4, 5]


def test_a_last_checkpoint_that_fails_while_it_is_written_ends_the_run(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})
    stack.policy.save_error = OSError(28, "No space left on device")

    async def go():
        stack.policy.save_gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        async with asyncio.timeout(20):
            while not any(event[0] == "save" for event in stack.events):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            stack.policy.save_gate.set()
            await run

    with pytest.raises(CheckpointError, match="step_000001: checkpoint not saved, the disk is full"):
        asyncio.run(go())
