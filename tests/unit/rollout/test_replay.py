"""Replay gives the recorded batches bit for bit, without engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from loop_fakes import FakePolicy, FakeProgress, K, make_stack, run_stack

from megatron_daro.controller import Controller
from megatron_daro.errors import DataError
from megatron_daro.observe.metrics import MetricsLog, read_metrics
from megatron_daro.rollout.recorder import Recorder, read_step
from megatron_daro.rollout.replay import ReplaySource


def replay(recorded, run, steps=6, **changes):
    """A controller over ReplaySource; returns its policy."""
    parts = make_stack(run).parts
    parts = replace(
        parts,
        engine=None,
        policy=FakePolicy(),
        source=ReplaySource(recorded, rollouts_per_prompt=K),
        metrics=MetricsLog(run, tensorboard=False),
        checkpoints=None,
        evaluate=None,
        progress=FakeProgress(),
        **changes,
    )
    section = make_stack(run / "unused", trainer={"steps": steps}).section
    controller = Controller(section, parts, max_staleness=0, rollouts_per_prompt=K)
    outcome = asyncio.run(controller.run())
    return parts, outcome


@pytest.mark.parametrize("updates", [1, 3])
def test_the_batches_and_weights_are_those_of_the_recorded_run(tmp_path, updates):
    original = make_stack(tmp_path / "a", trainer={"updates_per_batch": updates})
    run_stack(original)
    parts, outcome = replay(tmp_path / "a", tmp_path / "b")
    assert outcome.step == 6
    assert parts.policy.batches == original.policy.batches
    assert parts.policy.weights == original.policy.weights
    for key in ("loss/policy", "difficulty/predicted_loss/2"):
        recorded, again = ([m.get(key) for m in read_metrics(tmp_path / run)] for run in "ab")
        assert recorded == again
    assert [u for _, u in read_step(tmp_path / "b", 3)] == ["trained"] * len(read_step(tmp_path / "b", 3))


def test_a_replay_ends_with_the_recording(tmp_path):
    run_stack(make_stack(tmp_path / "a", trainer={"steps": 3}))
    parts, outcome = replay(tmp_path / "a", tmp_path / "b", steps=50)
    assert (outcome.status, outcome.step) == ("finished", 3)
    assert len(parts.policy.batches) == 3


def test_replay_keeps_the_step_numbers_when_a_step_trained_nothing(tmp_path):
    original = make_stack(tmp_path / "a", trainer={"on_nonfinite": "skip"})
    original.policy.nonfinite_steps = {3: "skip"}
    run_stack(original)
    parts, _ = replay(tmp_path / "a", tmp_path / "b")
    assert [step for step, _ in parts.policy.batches] == [1, 2, 4, 5, 6]
    assert parts.policy.weights == original.policy.weights


def test_a_replay_can_be_resumed(tmp_path):
    run_stack(make_stack(tmp_path / "a"))
    source = ReplaySource(tmp_path / "a", rollouts_per_prompt=K)
    first = asyncio.run(source.sample(0))
    state = first.snapshot.to_json({group.group_id: "trained" for group in first.groups})
    again = ReplaySource(tmp_path / "a", rollouts_per_prompt=K)
    again.load_state_dict(state)
    assert asyncio.run(again.sample(1)).first_step == 2
    assert again.ledger.counts()["trained"] == len(first.groups)


def test_what_cannot_be_replayed_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no recorded steps; the run needs observe.save_rollouts=true"):
        ReplaySource(tmp_path, rollouts_per_prompt=K)
    run_stack(make_stack(tmp_path))
    with pytest.raises(DataError, match=r"step 1 group \d+ has 4 rollouts but rollout.rollouts_per_prompt is 8"):
        asyncio.run(ReplaySource(tmp_path, rollouts_per_prompt=8).sample(0))
    (tmp_path / "rollouts" / "step_000003.jsonl.zst").unlink()
    with pytest.raises(DataError, match="step 3 is missing"):
        ReplaySource(tmp_path, rollouts_per_prompt=K)
    assert Recorder(tmp_path).truncate_after(0) == 5
