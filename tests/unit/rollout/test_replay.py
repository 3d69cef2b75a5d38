"""Replay gives the recorded batches bit for bit, without engines."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from books import check_books
from loop_fakes import FakePolicy, FakeProgress, K, make_stack, run_stack

from megatron_daro.config.sections import TrainerSection
from megatron_daro.controller import Controller
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import DataError, DeadlineError
from megatron_daro.observe.metrics import MetricsLog, read_metrics
from megatron_daro.rollout import replay as replay_source
from megatron_daro.rollout.evaluation import Evaluations
from megatron_daro.rollout.recorder import read_step
from megatron_daro.rollout.replay import ReplaySource


def source_of(run, section=None, size=K):
    return ReplaySource(run, section=section or TrainerSection(), rollouts_per_prompt=size, deadlines=Deadlines())


def replay(recorded, run, steps=6, trainer=None, **changes):
    """A controller over ReplaySource; returns its policy."""
    section = make_stack(run / "unused", trainer={"steps": steps, **(trainer or {})}).section
    parts = make_stack(run).parts
    parts = replace(
        parts,
        engine=None,
        evaluations=Evaluations(),
        policy=FakePolicy(),
        batches=source_of(recorded, section),
        metrics=MetricsLog(run, tensorboard=False),
        checkpoints=None,
        progress=FakeProgress(),
        **changes,
    )
    controller = Controller(section, parts, batches_ahead=0)
    outcome = asyncio.run(controller.run())
    return parts, outcome


@pytest.mark.parametrize(
    ("minibatches", "epochs", "skipped"), [(1, 1, []), (3, 1, []), (2, 2, []), (2, 3, [1, 4]), (1, 6, [1])]
)
def test_the_batches_and_weights_are_those_of_the_recorded_run(tmp_path, minibatches, epochs, skipped):
    """Also where old log-probs belong to steps that were not finite, but whose groups a later epoch trained."""
    trainer = {"minibatches_per_batch": minibatches, "epochs_per_batch": epochs, "on_nonfinite": "skip"}
    original = make_stack(tmp_path / "a", trainer=trainer)
    original.policy.nonfinite_steps = dict.fromkeys(skipped, "skip")
    run_stack(original)
    parts, outcome = replay(tmp_path / "a", tmp_path / "b", trainer=trainer)
    assert outcome.step == 6
    assert parts.policy.batches == [one for one in original.policy.batches if one[0] not in skipped]
    assert parts.policy.weights == original.policy.weights
    books = [read_metrics(tmp_path / run)[-1] for run in "ab"]
    assert len({(line["rollout/groups_trained"], line["rollout/groups_filtered"]) for line in books}) == 1
    if skipped:
        return
    for key in ("loss/policy", "difficulty/predicted_loss/2", "accuracy/mean", "rollout/epoch"):
        recorded, again = ([m.get(key) for m in read_metrics(tmp_path / run)] for run in "ab")
        assert recorded == again
    for step in range(1, 7):
        name = f"rollouts/step_{step:06d}.parquet"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_accuracy_counts_filtered_groups_as_in_the_recorded_run(tmp_path):
    run_stack(make_stack(tmp_path / "a"))
    replay(tmp_path / "a", tmp_path / "b")
    keys = [f"difficulty/groups/{k}" for k in range(K + 1)]
    keys += ["accuracy/mean", "reward/mean", "response/length_mean", "rollout/groups_filtered"]
    recorded, again = (
        [[line[key] for key in keys] for line in read_metrics(tmp_path / run) if line["step"]] for run in "ab"
    )
    assert recorded == again and any(line[-1] for line in recorded)
    check_books(tmp_path / "b")


def test_a_replay_ends_with_the_recording(tmp_path):
    run_stack(make_stack(tmp_path / "a", trainer={"steps": 3}))
    parts, outcome = replay(tmp_path / "a", tmp_path / "b", steps=50)
    assert (outcome.status, outcome.step) == ("finished", 3)
    assert len(parts.policy.batches) == 3
    assert any("trainer.steps" in text for text in parts.progress.messages)


def test_replay_keeps_the_step_numbers_when_a_step_trained_nothing(tmp_path):
    original = make_stack(tmp_path / "a", trainer={"on_nonfinite": "skip"})
    original.policy.nonfinite_steps = {3: "skip"}
    run_stack(original)
    parts, _ = replay(tmp_path / "a", tmp_path / "b")
    assert [step for step, _ in parts.policy.batches] == [1, 2, 4, 5, 6]
    assert parts.policy.weights == original.policy.weights
    staleness = [
        {line["step"]: line.get("rollout/staleness_mean") for line in read_metrics(tmp_path / r)} for r in "ab"
    ]
    assert staleness[1].items() <= staleness[0].items()


def test_a_replay_can_be_resumed(tmp_path):
    run_stack(make_stack(tmp_path / "a"))
    source = source_of(tmp_path / "a")
    first = asyncio.run(source.sample(0))
    state = first.snapshot.to_json({group.group_id: "trained" for group in first.groups})
    again = source_of(tmp_path / "a")
    again.load_state_dict(state)
    assert asyncio.run(again.sample(1)).recorded[0].step == 2
    assert again.ledger.counts()["trained"] == len(first.groups)


def test_a_replay_that_ended_within_a_batch_does_not_go_on_without_the_rest_of_it(tmp_path):
    trainer = {"minibatches_per_batch": 3}
    run_stack(make_stack(tmp_path / "a", trainer=trainer))
    source = source_of(tmp_path / "a", TrainerSection(**trainer, steps=2))
    first = asyncio.run(source.sample(0))
    state = first.snapshot.to_json({group.group_id: "trained" for group in first.groups})
    again = source_of(tmp_path / "a", TrainerSection(**trainer))
    again.load_state_dict(state)
    with pytest.raises(DataError, match="step 3 is in the middle of the batch of step 1"):
        asyncio.run(again.sample(2))


def test_groups_that_end_long_after_later_ones_can_be_replayed(tmp_path):
    """With servers a slow group is trained batches after groups with higher ids."""
    from fleet_fakes import FleetEngine

    rollout = {"prompts_per_batch": 3, "oversampling": 3.0, "max_staleness": 2, "keep_surplus": True}
    original = make_stack(tmp_path / "a", engine_class=FleetEngine, finish_batch="enough", rollout=rollout)
    original.engine.pace = lambda group_id: 6 if group_id % 5 == 0 else 1
    run_stack(original)
    ids = [[g.group_id for g, used in read_step(tmp_path / "a", step) if used == "trained"] for step in range(1, 7)]
    assert any(min(later) < max(earlier) for earlier, later in pairwise(ids)), "no group was late"
    parts, _ = replay(tmp_path / "a", tmp_path / "b")
    assert parts.policy.batches == original.policy.batches


def test_a_replay_of_fewer_steps_ends_within_a_batch(tmp_path):
    trainer = {"minibatches_per_batch": 2, "epochs_per_batch": 2}
    original = make_stack(tmp_path / "a", rollout={"prompts_per_batch": 4}, trainer={**trainer, "steps": 8})
    run_stack(original)
    parts, outcome = replay(tmp_path / "a", tmp_path / "b", steps=5, trainer=trainer)
    assert outcome.step == 5 and parts.policy.batches == original.policy.batches[:5]
    check_books(tmp_path / "b")
    assert read_metrics(tmp_path / "b")[-1]["rollout/groups_outstanding"] == 0


def test_a_disk_that_hangs_ends_a_replay_by_the_deadline_of_loading(tmp_path, monkeypatch):
    run_stack(make_stack(tmp_path))
    released = threading.Event()
    monkeypatch.setattr(replay_source, "read_step", lambda run, step: released.wait(10))
    section = TrainerSection(steps=6)
    source = ReplaySource(tmp_path, section=section, rollouts_per_prompt=K, deadlines=Deadlines(load=0.05))

    async def sample():
        try:
            await source.sample(0)
        finally:
            released.set()

    with pytest.raises(DeadlineError, match=r"'load'.*step 1"):
        asyncio.run(sample())
