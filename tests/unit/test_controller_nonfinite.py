"""Steps that are not finite end the run or are skipped: what is said and kept of them, and how many end a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books
from loop_fakes import make_stack, run_stack, with_parts

from megatron_daro.errors import DataError, NonFiniteError
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_groups, read_step
from megatron_daro.types import StepResult


def test_without_a_reason_and_a_recorder_the_run_still_ends_by_name(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})

    async def skips(batch, step):
        return StepResult(step, {}, skipped=True)

    stack.policy.train = skips
    with pytest.raises(NonFiniteError, match="step 1"):
        run_stack(with_parts(stack, recorder=None))


def test_lost_batches_are_counted_in_a_row_only(tmp_path):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip", "steps": 15, "save_every_steps": 0})
    stack.policy.nonfinite_steps = dict.fromkeys((1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14), "skip")
    assert run_stack(stack).step == 15
    warnings = [text for text in stack.progress.messages if "gradient norm is inf" in text]
    assert len(warnings) == 12 and "step 1" in warnings[0]


def test_a_batch_of_which_one_step_trained_is_not_lost(tmp_path):
    trainer = {"on_nonfinite": "skip", "steps": 12, "minibatches_per_batch": 2}
    stack = make_stack(tmp_path, trainer=trainer)
    stack.policy.nonfinite_steps = dict.fromkeys(range(2, 11), "skip")  # the last of the first batch, and four batches
    assert run_stack(stack).step == 12 and stack.policy.steps == 3


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_step_that_is_not_finite_stops_the_run_and_is_written_out(tmp_path, how):
    stack = make_stack(tmp_path)
    stack.policy.nonfinite_steps = {3: how}
    said = "loss is nan in micro-batch 3" if how == "raise" else "gradient norm is inf"
    with pytest.raises(NonFiniteError, match=rf"step 3.*{said}.*failed/step_000003\.parquet"):
        run_stack(stack)
    failed = read_groups(tmp_path / "failed" / "step_000003.parquet")
    assert len(failed) == 3
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_step_that_is_not_finite_can_be_skipped_and_is_counted(tmp_path, how):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip"})
    stack.policy.nonfinite_steps = {3: how}
    outcome = run_stack(stack)
    assert outcome.step == 6 and stack.policy.steps == 5
    assert [line["rollout/steps_skipped"] for line in read_metrics(tmp_path)] == [0, 0, 1, 1, 1, 1]
    assert {used for _, used in read_step(tmp_path, 3)} <= {"filtered", "dropped"}
    assert len(read_groups(tmp_path / "failed" / "step_000003.parquet")) == 3
    check_books(tmp_path)


def test_skipping_for_ever_is_an_error(tmp_path):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip", "steps": 50})
    stack.policy.nonfinite_steps = dict.fromkeys(range(2, 50), "skip")
    with pytest.raises(DataError, match=r"5 batches.*step 6.*gradient norm is inf"):
        run_stack(stack)
