"""The export at the end of a run: after the last checkpoint, once, and not for a run that a resume goes on with."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import FAST, NEVER, make_stack, resume_stack, run_stack, with_parts

from megatron_daro.checkpoints import find_latest_valid
from megatron_daro.errors import DeadlineError, SyncError


class Export:
    """What the parts hand to the controller. error: raised by it; hangs: it never ends."""

    def __init__(self, stack, *, error=None, hangs=False):
        self.stack, self.error, self.hangs, self.steps = stack, error, hangs, []
        with_parts(stack, export=self)

    async def __call__(self, step: int) -> None:
        assert not self.stack.policy.closed
        self.stack.events.append(("export", step))
        if self.error:
            raise self.error
        await asyncio.sleep(NEVER if self.hangs else 0)
        self.steps.append(step)


def saved_step(stack) -> int:
    return find_latest_valid(stack.run, stack.progress)[1]["step"]


def test_a_finished_run_is_exported_once_after_its_last_checkpoint(tmp_path):
    stack = make_stack(tmp_path)
    export = Export(stack)
    assert run_stack(stack).status == "finished"
    assert export.steps == [6] and stack.events[-2:] == [("save", 6), ("export", 6)]
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def test_a_run_that_was_stopped_is_exported_by_the_one_that_finishes_it(tmp_path):
    stack = make_stack(tmp_path)
    export = Export(stack)
    stack.progress.on_step = lambda step: stack.controller.request_stop("SIGTERM") if step == 3 else None
    outcome = run_stack(stack)
    assert (outcome.status, outcome.step, export.steps) == ("stopped", 3, [])
    assert ("export", 3) not in stack.events
    again = make_stack(tmp_path)
    export = Export(again)
    assert resume_stack(again).status == "finished" and export.steps == [6]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_ends_the_export_and_leaves_the_run_to_be_resumed(tmp_path, signals):
    stack = make_stack(tmp_path)
    export = Export(stack, hangs=True)

    async def go():
        run = asyncio.ensure_future(stack.controller.run())
        while ("export", 6) not in stack.events:
            await asyncio.sleep(0)
        for _ in range(signals):
            stack.controller.request_stop("SIGTERM")
        return await run

    outcome = asyncio.run(go())
    assert not any("without a checkpoint" in message for message in stack.progress.messages)
    assert (outcome.status, outcome.step, export.steps) == ("stopped", 6, [])
    assert saved_step(stack) == 6 and (stack.engine.closed, stack.policy.closed) == (1, 1)


@pytest.mark.parametrize("error", [SyncError("the disk is full"), None])
def test_an_export_that_fails_or_hangs_ends_the_run_with_its_checkpoint(tmp_path, error):
    stack = make_stack(tmp_path, deadlines=replace(FAST, export=0.05))
    Export(stack, error=error, hangs=True)
    with pytest.raises(SyncError if error else DeadlineError, match="disk is full" if error else "export"):
        run_stack(stack)
    assert saved_step(stack) == 6 and (stack.engine.closed, stack.policy.closed) == (1, 1)
