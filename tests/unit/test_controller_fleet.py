"""The loop over a fleet: batches that end early, groups kept in part across weight versions, crashes, checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books, recorded_once
from fleet_fakes import FleetEngine
from loop_fakes import Crash, K, make_stack, resume_stack, run_stack

from megatron_daro.checkpoints import find_latest_valid
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_waiting

FLEET = {
    "engine_class": FleetEngine,
    "finish_batch": "enough",
    "rollout": {"prompts_per_batch": 3, "oversampling": 2.0, "max_staleness": 1, "keep_surplus": True},
}


def _fleet(run, **options):
    """A loop whose engine has slow groups: some are always unfinished when their batch is full."""
    stack = make_stack(run, **FLEET, **options)
    stack.engine.pace = lambda group_id: 4 if group_id % 3 == 0 else 1
    return stack


@pytest.mark.parametrize("crash_at", [None, 3, 5])
def test_unfinished_groups_go_through_training_and_checkpoints(tmp_path, crash_at):
    stack = _fleet(tmp_path, crash=("train", crash_at, "enter") if crash_at else None)
    if crash_at:
        with pytest.raises(Crash):
            run_stack(stack)
        checkpoint, _ = find_latest_valid(tmp_path, stack.progress)
        unfinished = [record for record in read_waiting(checkpoint) if record.partial]
        assert unfinished, "the checkpoint has no unfinished group, so this test shows nothing"
        stack = _fleet(tmp_path)
        resume_stack(stack)
    else:
        run_stack(stack)
    check_books(tmp_path)
    recorded = recorded_once(tmp_path)
    rollouts = [r for _, group, used in recorded if used == "trained" for r in group.rollouts]
    assert any(len(r.version_spans) > 1 for r in rollouts), "no rollout of two weight versions was trained"
    for r in rollouts:
        assert sum(count for _, count in r.version_spans) == r.response_length
        assert r.weight_version == min(version for version, _ in r.version_spans)
    for step, group, used in recorded:
        assert used != "trained" or (len(group.rollouts) == K and step - 1 - group.weight_version <= 1)
    last = read_metrics(tmp_path)[-1]
    assert last["rollout/groups_unfinished"] > 0 and last["rollout/groups_resumed"] > 0
    assert last["rollout/groups_outstanding"] >= last["rollout/groups_unfinished"]


def test_a_stop_ends_what_is_in_flight(tmp_path):
    stack = _fleet(tmp_path)
    stack.engine.hangs = set(range(12, 999))
    stack.progress.on_step = lambda step: stack.controller.request_stop("SIGINT") if step == 1 else None
    outcome = run_stack(stack)
    assert outcome.status == "stopped" and not stack.engine.running
    check_books(tmp_path)


@pytest.mark.parametrize("staleness", [1, 3])
def test_what_is_kept_is_young_enough_for_the_next_batch(tmp_path, staleness):
    rollout = {"max_staleness": staleness, "keep_surplus": True, "oversampling": 2.0}
    stack = make_stack(tmp_path, rollout=rollout, filter_groups=False, trainer={"steps": 12})
    run_stack(stack)
    counts = stack.sampler.ledger.counts()
    assert counts["trained"] == counts["admitted"] and counts["dropped"] == 0
