"""Steps of one rank: rates, metrics, log-probs; saves under way, and what is refused of files."""

from __future__ import annotations

import gc
import math
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lab_names import configured
from policy_tasks import everything
from single_rank import GRPO, ROWS, policy_of, rates
from small_models import random_batch

from megatron_daro.actor import checkpoint, optimizer, shard_file, sharded_state
from megatron_daro.actor.compat import forget_rotary_tables
from megatron_daro.errors import CheckpointError, ConfigError, DataError, NonFiniteError

pytestmark = pytest.mark.usefixtures("world")


PEAK, RATIO, WARMUP, TOTAL = 1e-3, 0.1, 3, 10  # TOTAL: steps of these policies


def rate_of(schedule, step):
    if step <= WARMUP:
        return PEAK * step / WARMUP
    done = (step - WARMUP) / (TOTAL - WARMUP)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]
    return PEAK if schedule == "constant" else PEAK * (RATIO + shape * (1 - RATIO))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_rate_warms_up_and_then_follows_its_schedule(model, schedule):
    options = {"learning_rate": PEAK, "warmup_steps": WARMUP, "schedule": schedule, "min_learning_rate_ratio": RATIO}
    found = rates(policy_of(model, GRPO, optimizer=options), TOTAL)
    assert found == pytest.approx([rate_of(schedule, step) for step in range(1, TOTAL + 1)])


def test_after_a_load_the_schedule_goes_on_with_this_runs_rate(tmp_path, model):
    options = {"warmup_steps": 4, "weight_decay": 0.3}
    policy = policy_of(model, GRPO, optimizer={**options, "learning_rate": 1e-3})
    rates(policy, 2)
    policy.start_save(tmp_path)
    policy.finish_save()
    again = policy_of(model, GRPO, to_be_restored=True, optimizer={"learning_rate": 1e-2, "warmup_steps": 4})
    again.load(tmp_path)
    assert rates(again, 1, first=3) == pytest.approx([7.5e-3])
    assert {group["weight_decay"] for group in again.train_state.optimizer.param_groups} <= {0.0, 0.01}


def test_moments_of_other_optimizers():
    """Transformer Engine's counts in its groups; what is no Adam's is refused by name."""
    state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "master_param": torch.ones(2)}
    groups = [{"step": 3}, {"step": torch.tensor(4.0)}, {}]
    inner = SimpleNamespace(state={"p": state}, param_groups=groups)
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(), SimpleNamespace(optimizer=inner)])
    optimizer.reset_moments(chained)
    assert {name: values.tolist() for name, values in state.items()} == {
        "exp_avg": [0, 0], "exp_avg_sq": [0, 0], "master_param": [1, 1]
    }  # fmt: skip
    assert groups[0] == {"step": 0} and groups[1]["step"].item() == 0.0 and groups[2] == {}
    assert torch.is_tensor(groups[1]["step"])
    state |= {"momentum": torch.ones(1), "age": 1}
    with pytest.raises(ConfigError, match=r"reset_optimizer: .*age, momentum"):
        optimizer.reset_moments(chained)


def test_a_step_says_what_weights_it_was_taken_with_and_how_long_its_passes_took(model):
    policy = policy_of(model, {"name": "daro", "daro": {"learning_rate": 0.5}}, optimizer={"learning_rate": 1e-3})
    first, second = (policy.train_step(random_batch(seed=n), ROWS, step=n + 1) for n in range(2))
    names = [f"difficulty/weight/{k}" for k in range(1, 4)]
    assert [first.metrics[name] for name in names] == [1.0, 1.0, 1.0]
    assert [second.metrics[name] for name in names] != [1.0, 1.0, 1.0]
    assert "difficulty/weight/0" not in first.metrics and "difficulty/weight/4" not in first.metrics
    assert first.metrics["difficulty/clamped"] in (0.0, 1.0)
    assert 0 < first.own_s <= first.metrics["timing/forward_backward_s"] < 60


@pytest.mark.parametrize(
    ("algorithm", "by", "classes"),
    [
        ({"name": configured("daro_cells"), "options": {"length_edges": [8], "half_life": 1}}, "length", "01"),
        ({"name": "daro", "daro": {"weights_by": "environment_pass_rate", "half_life": 1}}, "environment", "ab"),
    ],
)
def test_weights_of_classes_are_told_for_each(model, algorithm, by, classes):
    policy = policy_of(model, algorithm, optimizer={"learning_rate": 1e-3})
    batches = [random_batch(seed=n) for n in range(2)]
    batches = [replace(batch, environments_N=batch.group_ids_N % 2) for batch in batches]
    _, after = (policy.train_step(batch, ROWS, step=n + 1).metrics for n, batch in enumerate(batches))
    for k in range(1, 4):
        one, other = (after[f"difficulty/weight_by_{by}/{k}/{c}"] for c in classes)
        assert abs(one - other) > 0.01 and after[f"difficulty/weight/{k}"] == pytest.approx((one + other) / 2)
    assert f"difficulty/weight_by_{by}/1/2" not in after


def test_an_algorithm_that_refuses_the_sums_leaves_the_weights_as_they_were(model, monkeypatch):
    """The run then counts the step as none."""

    def refuse(sums):
        raise NonFiniteError("my sum is nan")

    policy, batch = policy_of(model, GRPO, optimizer={"learning_rate": 1e-2}), random_batch()
    before = policy.logprobs(batch, ROWS)
    monkeypatch.setattr(policy.train_state.algorithm, "learn", refuse)
    with pytest.raises(NonFiniteError, match="my sum"):
        policy.train_step(batch, ROWS, step=1)
    assert np.array_equal(policy.logprobs(batch, ROWS), before)


def test_a_policy_that_is_gone_leaves_no_tables_of_angles_behind(model):
    """Megatron keeps those of 32 models."""
    policy = policy_of(model, GRPO)
    policy.logprobs(random_batch(), ROWS)
    angles = weakref.ref(policy.chunks[0].rotary_pos_emb)
    del policy
    forget_rotary_tables()
    gc.collect()
    assert angles() is None


def test_the_reference_is_what_the_run_started_from(model):
    options = {"optimizer": {"learning_rate": 1e-2}}
    policy, batch = policy_of(model, {"name": "grpo", "kl": {"coefficient": 0.1}}, **options), random_batch()
    before = policy.logprobs(batch, ROWS)
    policy.train_step(replace(batch, ref_logprobs_R=before), ROWS, step=1)
    moved = policy.logprobs(batch, ROWS)
    assert np.abs(moved - before).max() > 1e-3
    assert np.array_equal(policy.reference_logprobs(batch, ROWS), before)
    assert np.array_equal(policy.logprobs(batch, ROWS), moved)


def test_another_temperature_for_one_pass(model):
    policy, batch = policy_of(model, GRPO), random_batch()
    plain, hot = policy.logprobs(batch, ROWS), policy.logprobs(batch, ROWS, temperature=3.0)
    assert plain.dtype == np.float32 and plain.shape == batch.loss_mask_R.shape
    assert np.abs(plain - hot).max() > 0.1 and np.array_equal(policy.run_pass("old_logprobs", batch, ROWS), plain)


@pytest.mark.parametrize("place", [0, -1])
def test_a_token_outside_of_the_vocabulary_is_refused(model, place):
    batch = random_batch()
    tokens_T = batch.tokens_T.copy()
    tokens_T[place] = 50
    with pytest.raises(DataError, match=r"tokens: .*\b50\b"):
        policy_of(model, GRPO).logprobs(replace(batch, tokens_T=tokens_T), ROWS)


def test_a_disk_that_refuses_a_checkpoint_is_named(tmp_path, model, monkeypatch):
    policy = policy_of(model, GRPO)

    def refuse(*_):
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(shard_file.FileWriter, "write", refuse)
    policy.start_save(tmp_path)
    policy.end_background_work()
    with pytest.raises(CheckpointError, match=rf"{tmp_path} .*the disk is full"):
        policy.finish_save()


def test_a_save_on_a_slow_disk_has_the_weights_of_when_it_began(tmp_path, model, monkeypatch):
    write = shard_file.FileWriter.write
    monkeypatch.setattr(shard_file.FileWriter, "write", lambda self, values: (time.sleep(0.01), write(self, values)))
    policy = policy_of(model, GRPO, optimizer={"learning_rate": 1e-2})
    rates(policy, 1)
    before = everything(policy)
    policy.start_save(tmp_path)
    rates(policy, 1, first=2)
    policy.finish_save()
    moved, _ = everything(policy), policy.load(tmp_path)
    loaded = everything(policy)
    numbers = [name for name in before if name.startswith("parameter") or "exp_avg" in name]
    assert all((moved[name] != before[name]).any() for name in numbers), "the step was taken"
    assert all(np.array_equal(loaded[name], before[name]) for name in numbers)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path, model):
    with pytest.raises(CheckpointError, match=r"metadata\.json"):
        policy_of(model, GRPO).load(tmp_path)


@pytest.mark.parametrize("error", [KeyError, TypeError])
def test_a_state_that_is_not_the_algorithms_is_refused_by_name(tmp_path, error):
    def load_state_dict(state):
        assert state == {"a": 1}
        raise error("no")

    algorithm = SimpleNamespace(name="mine", load_state_dict=load_state_dict)
    (tmp_path / "algorithm.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match=rf"algorithm\.json: .*mine .*{error.__name__}"):
        checkpoint.load_algorithm(algorithm, tmp_path / "algorithm.json")


def test_boxes_that_are_no_whole_tensor_together_are_not_saved(tmp_path):
    boxes = [shard_file.OwnBox("w", torch.zeros(4), (at,), (4,), (9,)) for at in (0, 4)]
    with pytest.raises(CheckpointError, match=r"w: 8 .*\(9,\)"):
        sharded_state.collect_shards({}, tmp_path, boxes)
    whole = [*boxes, shard_file.OwnBox("w", torch.zeros(1), (8,), (1,), (9,))]
    sharded_state.collect_shards({}, tmp_path, whole).write()


def test_rows_that_only_pad_may_be_of_another_number(tmp_path):
    rows = torch.arange(12.0).reshape(6, 2)
    stored = sharded_state.ShardedTensor.from_rank_offsets("w", rows, allow_shape_mismatch=True)
    sharded_state.collect_shards([stored], tmp_path).write()
    wanted = sharded_state.ShardedTensor.from_rank_offsets("w", torch.ones(8, 2), allow_shape_mismatch=True)
    (found,) = sharded_state.read_shards([wanted], tmp_path)
    assert torch.equal(found, torch.cat([rows, torch.zeros(2, 2)]))
