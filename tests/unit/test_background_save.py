"""Checkpoints are written while the loop trains on: what they hold, how failures show, and that nothing is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))
from loop_fakes import FakeProgress, make_stack, resume_stack, run_stack

from megatron_daro.checkpoints import find_latest_valid, step_directories
from megatron_daro.errors import CheckpointError, LostSaveError, NonFiniteError


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
    with pytest.raises(CheckpointError, match="step_000004"):
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
    save, lost = stack.policy.save, asyncio.Event()
    stack.progress.on_step = lambda step: lost.set() if step == 5 else None

    async def lost_once(directory, captured):
        is_lost = stack.policy.steps == 4
        await save(directory, captured)
        if is_lost:
            await lost.wait()
            raise LostSaveError("rank 3 died")

    stack.policy.save = lost_once
    run_stack(stack)
    names = [path.name for path in step_directories(tmp_path / "checkpoints")]
    assert names == ["step_000006", "step_000005", "step_000002"]
    assert any("rank 3 died" in message for message in stack.progress.messages)


def test_who_stops_twice_does_not_wait_for_a_checkpoint(tmp_path):
    stack = make_stack(tmp_path)
    slow_saves(stack)

    def on_step(step):
        if step == 3:
            stack.controller.request_stop("SIGINT")
            asyncio.get_running_loop().call_later(0.05, stack.controller.request_stop, "SIGINT")

    stack.progress.on_step = on_step
    assert run_stack(stack).status == "interrupted"
    assert not step_directories(tmp_path / "checkpoints") and stack.policy.closed == 1
