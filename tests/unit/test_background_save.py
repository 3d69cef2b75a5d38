"""Checkpoints are written while the loop trains on: what they hold, how failures show, and that nothing is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))
from loop_fakes import FakeProgress, make_stack, resume_stack, run_stack

from megatron_daro.errors import CheckpointError, LostSaveError, NonFiniteError
from megatron_daro.recovery import BackgroundSave, find_latest_valid, step_directories


def slow_saves(stack) -> asyncio.Event:
    """Files are written when the event is set; the state was captured before."""
    stack.policy.save_gate = asyncio.Event()
    return stack.policy.save_gate


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    stack = make_stack(tmp_path)
    gate = slow_saves(stack)
    seen = []

    def on_step(step):
        seen.append((step, [path.name for path in step_directories(tmp_path / "checkpoints")]))
        if step == 4:
            gate.set()

    stack.progress.on_step = on_step
    run_stack(stack)
    assert dict(seen)[3] == dict(seen)[4] == []  # step 2's was being written during steps 3 and 4
    assert [path.name for path in step_directories(tmp_path / "checkpoints")] == ["step_000006", "step_000004"]


def test_it_holds_the_state_of_its_step_and_not_of_those_trained_meanwhile(tmp_path):
    plain = make_stack(tmp_path / "plain", trainer={"keep_checkpoints": 9})
    run_stack(plain)
    slow = make_stack(tmp_path / "slow", trainer={"keep_checkpoints": 9})
    gate = slow_saves(slow)
    slow.progress.on_step = lambda step: gate.set() if step == 4 else None
    run_stack(slow)
    for step in (2, 4, 6):
        one, other = (tmp_path / name / f"checkpoints/step_{step:06d}" for name in ("plain", "slow"))
        assert (one / "state.json").read_bytes() == (other / "state.json").read_bytes()
        assert (one / "shards/0.json").read_bytes() == (other / "shards/0.json").read_bytes()


def test_a_failure_ends_the_run_with_its_error_and_the_one_before_is_used(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 12})
    gate = slow_saves(stack)
    gate.set()

    def on_step(step):
        if step == 4:
            gate.clear()
            stack.policy.save_error = OSError(28, "No space left on device")
        if step == 5:
            gate.set()

    stack.progress.on_step = on_step
    with pytest.raises(CheckpointError, match="step_000004: checkpoint not saved, the disk is full"):
        run_stack(stack)
    assert stack.policy.steps < 12
    assert find_latest_valid(tmp_path, FakeProgress())[1]["step"] == 2
    resumed = make_stack(tmp_path, trainer={"steps": 12})
    resume_stack(resumed)
    assert resumed.policy.steps == 12


def test_a_run_that_fails_meanwhile_still_has_its_checkpoint(tmp_path):
    stack = make_stack(tmp_path)
    gate = slow_saves(stack)
    stack.policy.nonfinite_steps = {3: "raise"}
    stack.progress.on_step = lambda step: asyncio.get_running_loop().call_later(0.05, gate.set)
    with pytest.raises(NonFiniteError):
        run_stack(stack)
    assert find_latest_valid(tmp_path, FakeProgress())[1]["step"] == 2
    assert json.loads((tmp_path / "checkpoints/step_000002/shards/0.json").read_text())[1] == 2


def test_one_that_is_lost_with_a_rank_is_written_again(tmp_path):
    stack = make_stack(tmp_path, trainer={"keep_checkpoints": 9})
    save, saves = stack.policy.save, []

    async def lost_once(directory, captured):
        saves.append(directory)
        await save(directory, captured)
        if len(saves) == 2:
            raise LostSaveError("rank 3 died")

    stack.policy.save = lost_once
    run_stack(stack)
    names = [path.name for path in step_directories(tmp_path / "checkpoints")]
    assert names[0] == "step_000006" and names[-1] == "step_000002" and len(names) == len(saves) - 1
    assert "warning: rank 3 died; it is saved again after the next batch" in stack.progress.messages


class Saves:
    """Saves that a test holds."""

    def __init__(self) -> None:
        self.gate, self.begun, self.ended, self.error = asyncio.Event(), 0, 0, None

    async def __call__(self, captured) -> None:
        self.begun += 1
        captured()
        await self.gate.wait()
        if self.error:
            raise self.error
        self.ended += 1


def test_a_background_save_returns_when_the_state_is_captured_and_the_next_one_waits_for_it():
    async def go():
        saving, first, second = BackgroundSave(), Saves(), Saves()
        await saving.finished()
        await saving.begin(first)
        saving.check()
        await asyncio.sleep(0)
        assert (first.begun, first.ended) == (1, 0) and len(asyncio.all_tasks()) == 2, "this one and the save"
        next_one = asyncio.ensure_future(saving.begin(second))
        await asyncio.sleep(0.01)
        assert second.begun == 0 and not next_one.done()
        first.gate.set()
        await next_one
        assert (first.ended, second.begun) == (1, 1)
        second.gate.set()
        await saving.finished()
        assert second.ended == 1

    asyncio.run(go())


def test_a_background_save_that_ends_without_a_word_is_done():
    async def go():
        saving, ended = BackgroundSave(), []

        async def save(captured):
            ended.append(True)

        async with asyncio.timeout(10):
            await saving.begin(save)
        assert ended == [True]

    asyncio.run(go())


def test_what_went_wrong_with_a_background_save_is_raised_once():
    async def go():
        saving, save = BackgroundSave(), Saves()
        save.error = CheckpointError("full")
        await saving.begin(save)
        save.gate.set()
        with pytest.raises(CheckpointError, match="full"):
            await saving.finished()
        saving.check()
        await saving.finished()

        async def at_once(captured):
            raise CheckpointError("no state")

        with pytest.raises(CheckpointError, match="no state"):
            await saving.begin(at_once)

    asyncio.run(go())


@pytest.mark.parametrize("error", [None, CheckpointError("full")])
def test_at_the_end_a_background_save_is_waited_for_and_its_failure_is_said(error):
    async def go():
        saving, save, progress = BackgroundSave(), Saves(), FakeProgress()
        await saving.end(progress, at_once=False)
        save.error = error
        await saving.begin(save)
        asyncio.get_running_loop().call_later(0.01, save.gate.set)
        await saving.end(progress, at_once=False)
        assert save.ended == (error is None) and progress.messages == (["warning: full"] if error else [])

    asyncio.run(go())


def test_at_once_a_background_save_is_given_up():
    async def go():
        saving, save, progress = BackgroundSave(), Saves(), FakeProgress()
        await saving.begin(save)
        async with asyncio.timeout(10):
            await saving.end(progress, at_once=True)
        assert save.ended == 0 and progress.messages == []
        saving.check()

    asyncio.run(go())
