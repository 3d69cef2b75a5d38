"""Steps that are not finite: what is said of them, and how many lost batches in a row end a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import make_stack, run_stack

from megatron_daro.errors import NonFiniteError
from megatron_daro.types import StepResult


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_step_that_is_not_finite_says_what_the_policy_said(tmp_path, how):
    stack = make_stack(tmp_path, trainer={"steps": 1, "save_every_steps": 0})
    stack.policy.nonfinite_steps = {1: how}
    said = "loss is nan in micro-batch 3" if how == "raise" else "gradient norm is inf"
    with pytest.raises(NonFiniteError, match=rf"^step 1: {said}; no .*set trainer\.on_nonfinite=skip$"):
        run_stack(stack)


def test_without_a_reason_and_a_recorder_the_message_still_says_what_happened(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})

    async def skips(batch, step):
        return StepResult(step, {}, skipped=True)

    stack.policy.train = skips
    stack.controller._parts = replace(stack.parts, recorder=None)
    words = "step 1: loss or gradient is not finite; no optimizer step; observe.save_rollouts is off, so"
    with pytest.raises(NonFiniteError, match=words):
        run_stack(stack)


def test_lost_batches_are_counted_in_a_row_only(tmp_path):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip", "steps": 15, "save_every_steps": 0})
    stack.policy.nonfinite_steps = dict.fromkeys((1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14), "skip")
    assert run_stack(stack).step == 15
    warnings = [text for text in stack.progress.messages if "no optimizer step" in text]
    assert len(warnings) == 12 and warnings[0].startswith("warning: step 1: gradient norm is inf; ")
