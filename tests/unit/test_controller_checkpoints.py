"""Checkpoints of the loop: when they are written, what is in them, and what a resumed run takes from them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books, files_of
from loop_fakes import EVALUATE, Crash, make_stack, resume_stack, run_stack

from megatron_daro.checkpoints import STATE_FORMAT, find_latest_valid, step_directories
from megatron_daro.errors import CheckpointError
from megatron_daro.rollout.recorder import read_step, read_waiting


def test_the_state_of_a_checkpoint(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 3, "on_nonfinite": "skip"})
    stack.policy.nonfinite_steps = {2: "skip"}
    run_stack(stack)
    _, state = find_latest_valid(tmp_path, stack.progress)
    assert (state["format"], state["step"], state["batches_done"], state["skipped_steps"]) == (STATE_FORMAT, 3, 3, 1)


def test_a_resumed_run_that_is_finished_saves_nothing_twice(tmp_path):
    run_stack(make_stack(tmp_path, trainer={"steps": 4, "minibatches_per_batch": 2}))
    again = make_stack(tmp_path, trainer={"steps": 4, "minibatches_per_batch": 2})
    saved = step_directories(tmp_path / "checkpoints")[0]
    before = saved.stat().st_ino
    assert resume_stack(again).step == 4
    assert saved.stat().st_ino == before and not any(event[0] == "save" for event in again.events)


def test_steps_that_are_saved_are_multiples_of_the_distance(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 5, "save_every_steps": 2, "keep_checkpoints": 2})
    run_stack(stack)
    assert [event for event in stack.events if event[0] == "save"] == [("save", 2), ("save", 4), ("save", 5)]


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

    with pytest.raises(CheckpointError, match="step_000001"):
        asyncio.run(go())


def _borders() -> list[tuple[str, int, str]]:
    names = ["rollout", "reward", "build", "logprob", "train", "sync", "evaluate", "write", "checkpoint"]
    numbers = {"reward": (1, 13, 30), "evaluate": (1,), "checkpoint": (1, 2)}
    return [(n, i, side) for n in names for i in numbers.get(n, (1, 3, 5)) for side in ("enter", "exit")]


BORDERS = [
    border if number % 3 == 0 else pytest.param(border, marks=pytest.mark.heavy)
    for number, border in enumerate(_borders())
]


@pytest.mark.parametrize("border", BORDERS, ids=lambda b: f"{b[0]}-{b[1]}-{b[2]}")
def test_a_run_that_crashed_at_any_phase_resumes_bit_for_bit(tmp_path, border, unbroken):
    stack = make_stack(tmp_path, crash=border, trainer=EVALUATE)
    with pytest.raises(Crash):
        run_stack(stack)
    assert border in stack.phases.borders
    resumed = make_stack(tmp_path, order_seed=7, trainer=EVALUATE)
    assert resume_stack(resumed).step == 6
    assert files_of(tmp_path) == files_of(unbroken.run)
    assert resumed.policy.weights == unbroken.policy.weights
    assert resumed.sampler.ledger.state_dict() == unbroken.sampler.ledger.state_dict()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    stack = make_stack(tmp_path_factory.mktemp("unbroken"), trainer=EVALUATE)
    run_stack(stack)
    return stack


@pytest.mark.parametrize(("staleness", "saved"), [(0, 4), (1, 3), (2, 3)])  # From 1, every other batch is all carried.
def test_carried_groups_and_attempts_survive_a_crash(tmp_path, staleness, saved):
    rollout = {"max_staleness": staleness, "keep_surplus": True, "oversampling": 2.0}
    stack = make_stack(
        tmp_path,
        crash=("train", saved + 1, "enter"),
        rollout=rollout,
        trainer={"save_every_steps": 1},
        filter_groups=False,
    )
    stack.engine.abort_rollouts = {(i, 0, 1) for i in range(0, 90, 4)}
    with pytest.raises(Crash):
        run_stack(stack)
    checkpoint, state = find_latest_valid(tmp_path, stack.progress)
    assert state["step"] == saved and state["sampler"]["ledger"]["retries"]
    assert read_waiting(checkpoint), "no group waits in the checkpoint, so this test shows nothing"
    resumed = make_stack(tmp_path, rollout=rollout, filter_groups=False)
    resumed.engine.abort_rollouts = stack.engine.abort_rollouts
    resume_stack(resumed)
    check_books(tmp_path)
    seen = [g.group_id for step in range(1, 7) for g, used in read_step(tmp_path, step) if used == "trained"]
    assert len(seen) == len(set(seen))
    if staleness == 0:
        whole = make_stack(tmp_path / "whole", rollout=rollout, filter_groups=False)
        whole.engine.abort_rollouts = stack.engine.abort_rollouts
        run_stack(whole)
        assert files_of(tmp_path) == files_of(whole.run)
        assert resumed.policy.weights == whole.policy.weights


def test_a_checkpoint_with_generation_far_ahead_loses_and_repeats_nothing(tmp_path):
    rollout = {"max_staleness": 2, "oversampling": 1.0}
    stack = make_stack(tmp_path, crash=("checkpoint", 2, "exit"), rollout=rollout, filter_groups=False)
    with pytest.raises(Crash):
        run_stack(stack)
    _, state = find_latest_valid(tmp_path, stack.progress)
    assert state["step"] == 4
    assert stack.source.cursor > 3 * 4
    # Checkpoint of step 4: exactly the prompts of four batches are used up, and their groups are the only ones known.
    assert state["sampler"]["source"] == {"cursor": 12}
    assert state["sampler"]["ledger"]["outstanding"] == []
    assert state["sampler"]["ledger"]["finished"] == {"trained": 12, "filtered": 0, "dropped": 0}
    resumed = make_stack(tmp_path, rollout=rollout, filter_groups=False)
    resume_stack(resumed)
    prompts = [g.prompt.id for step in range(1, 7) for g, _ in read_step(tmp_path, step)]
    assert prompts == [f"p{i}" for i in range(18)]


def test_a_finished_run_resumes_to_nothing_and_to_more_steps(tmp_path):
    run_stack(make_stack(tmp_path, trainer={"steps": 4}))
    again = make_stack(tmp_path, trainer={"steps": 4})
    assert resume_stack(again).step == 4 and not again.policy.batches
    more = make_stack(tmp_path, trainer={"steps": 6})
    resume_stack(more)
    whole = make_stack(tmp_path / "whole", trainer={"steps": 6})
    run_stack(whole)
    assert files_of(tmp_path) == files_of(whole.run) and more.policy.weights == whole.policy.weights
