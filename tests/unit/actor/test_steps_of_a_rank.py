"""Steps of one rank: rates, moments, what is refused; log-probs; saves under way, and what is refused of files."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import policy_tasks
import pytest
import torch
from single_rank import GRPO, ROWS, policy_of, rates
from small_models import random_batch

from megatron_daro.actor import checkpoint, compat, device, forward, optimizer, step
from megatron_daro.actor.parallel import Layout
from megatron_daro.errors import AlgorithmError, CheckpointError, ConfigError, DataError
from megatron_daro.types import KINDS_OF_MEMORY

pytestmark = pytest.mark.usefixtures("world")
DARO = {"name": "daro"}


@pytest.mark.parametrize(
    ("schedule", "wanted"), [("constant", [1, 1]), ("linear", [0.9, 0.8]), ("cosine", [0.952, 0.827])]
)
def test_a_rate_warms_up_and_then_follows_its_schedule(model, schedule, wanted):
    """Of 10 steps 5 warm up; at the end the rate is half of its peak."""
    options = {"learning_rate": 1e-3, "warmup_steps": 5, "schedule": schedule, "min_learning_rate_ratio": 0.5}
    found = rates(policy_of(model, GRPO, optimizer=options), 7)
    assert found[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert [rate / 1e-3 for rate in found[5:]] == pytest.approx(wanted, abs=2e-3)


def test_after_a_load_the_schedule_goes_on_with_this_runs_rate(tmp_path, model):
    options = {"warmup_steps": 4, "weight_decay": 0.3}
    policy = policy_of(model, GRPO, optimizer={**options, "learning_rate": 1e-3})
    rates(policy, 2)
    policy.save(tmp_path)
    again = policy_of(model, GRPO, to_be_restored=True, optimizer={"learning_rate": 1e-2, "warmup_steps": 4})
    again.load(tmp_path)
    assert rates(again, 1, first=3) == pytest.approx([7.5e-3])
    assert {group["weight_decay"] for group in again.train_state.optimizer.param_groups} <= {0.0, 0.01}


@pytest.mark.parametrize("reset", [True, False])
def test_moments_begin_anew_with_the_first_update_of_a_batch(model, reset):
    found = policy_tasks.moments(
        path=model,
        layout=Layout(),
        batch=random_batch(),
        opens=[True, False, True, False],
        spoiled=[3],
        algorithm={"name": "kimi", "kimi": {"tau": 0.3, "reset_optimizer": reset}},
    )
    counts = [count for count, _ in found]
    assert counts[:2] + counts[3:] == [{1.0}, {2.0}, {1.0 if reset else 3.0}]
    assert [of_one for _, of_one in found][3] is reset


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
    with pytest.raises(ConfigError, match=r"reset_optimizer: got true with an optimizer that keeps age, momentum; all"):
        optimizer.reset_moments(chained)


BAD = {
    "loss": (lambda b: replace(b, advantages_N=b.advantages_N * np.nan), "the loss was not finite (loss nan, grad"),
    "gradient": (
        lambda b: replace(b, advantages_N=b.advantages_N * 0 + 1e30),
        "the gradient norm was not finite (",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_step_that_is_not_finite_leaves_no_trace(model, kind):
    spoil, reason = BAD[kind]
    arguments = {"path": model, "layout": Layout(), "poison": "", "algorithm": DARO}
    good = [random_batch(seed=1), random_batch(seed=2)]
    bad, clean = (
        policy_tasks.skip_and_go_on(
            **arguments, good=good, bad=bad, optimizer={"learning_rate": 1e-2, "warmup_steps": 3}
        )
        for bad in (spoil(random_batch(seed=7)), None)
    )
    assert bad["outcome"]["skipped"] and bad["outcome"]["reason"].startswith(reason)
    assert bad["outcome"]["changed"] == []
    assert all(np.array_equal(bad["end"][name], value) for name, value in clean["end"].items())


def test_an_advantage_that_is_no_number_skips_the_step_before_anything(model):
    batch = replace(random_batch(), rewards_N=np.full(24, 7, np.float32))
    batch = replace(batch, ref_logprobs_R=batch.rollout_logprobs_R, opens_batch=True)
    policy = policy_of(model, {"name": "toy_algorithm:Faulty", "options": {"fault": "nan"}})
    result = policy.train_step(batch, ROWS, step=5)
    assert (result.step, result.skipped, dict(result.metrics)) == (5, True, {})
    assert "advantage that is not finite" in result.reason and policy.train_state.begun


def test_a_step_says_what_weights_it_was_taken_with_and_how_long_its_passes_took(model):
    policy = policy_of(model, {"name": "daro", "daro": {"learning_rate": 0.5}}, optimizer={"learning_rate": 1e-3})
    first, second = (policy.train_step(random_batch(seed=n), ROWS, step=n + 1) for n in range(2))
    names = [f"difficulty/weight/{k}" for k in range(1, 4)]
    assert [first.metrics[name] for name in names] == [1.0, 1.0, 1.0]
    assert [second.metrics[name] for name in names] != [1.0, 1.0, 1.0]
    assert "difficulty/weight/0" not in first.metrics and "difficulty/weight/4" not in first.metrics
    assert first.metrics["difficulty/clamped"] in (0.0, 1.0) and not first.reason and first.step == 1
    assert 0 < first.own_s <= first.metrics["timing/forward_backward_s"] < 60
    assert policy.chunks[0].config.finalize_model_grads_func is compat.finalize_summed_grads


def test_weights_by_length_are_named_by_pass_rate_and_class():
    weights = torch.tensor([[9.0, 9.0], [1.0, 2.0], [3.0, 5.0], [9.0, 9.0]])
    assert step._weight_metrics(weights) == {
        "difficulty/weight/1": 1.5,
        "difficulty/weight/2": 4.0,
        "difficulty/weight_by_length/1/0": 1.0,
        "difficulty/weight_by_length/1/1": 2.0,
        "difficulty/weight_by_length/2/0": 3.0,
        "difficulty/weight_by_length/2/1": 5.0,
    }
    assert step._weight_metrics(weights[:, :1]) == {"difficulty/weight/1": 1.0, "difficulty/weight/2": 3.0}


def test_time_that_was_not_measured_is_0(monkeypatch):
    own, config = step.OwnTime(), SimpleNamespace(finalize_model_grads_func=lambda *_, **__: time.sleep(0))
    assert own.seconds() == 0.0
    finish = config.finalize_model_grads_func
    with own.measured(config):
        assert own.seconds() == 0.0
        config.finalize_model_grads_func(1, pg=2)
    own._marks = [1.0, 3.5]
    assert own.seconds() == 2.5 and config.finalize_model_grads_func is finish
    events = [SimpleNamespace(elapsed_time=lambda end: end.at), SimpleNamespace(at=1500.0)]
    own._marks = events
    assert own.seconds() == 1.5, "a GPU counts milliseconds"


def test_passes_on_a_gpu_are_timed_by_its_events(monkeypatch):
    recorded = []
    made = SimpleNamespace(record=lambda: recorded.append(1))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: made if enable_timing else None)
    monkeypatch.setattr(device, "prepare", lambda: torch.device("cuda", 0))
    own = step.OwnTime()
    own._mark()
    assert own._marks == [made] and recorded == [1]


def test_kl_of_rollouts_counts_each_answer_once():
    totals = SimpleNamespace(tokens=torch.tensor(12.0), num_rollouts=3)
    assert step._kl_scales(torch.tensor([4, 0, 8]), totals).tolist() == [1.0, 4.0, 0.5]
    assert step._kl_scales(torch.tensor([4]), SimpleNamespace(tokens=torch.tensor(4.0), num_rollouts=0)).item() == 1.0


def test_a_group_without_a_parameter_has_no_rate():
    assert optimizer._learning_rate(SimpleNamespace(param_groups=[])) == 0.0
    assert optimizer._learning_rate(SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 0.7}])) == 0.5


def test_options_of_groups_are_put_back_without_parameters_and_age():
    groups = [{"params": [1], "step": 3, "lr": 0.1}, {"params": [2], "lr": 0.2, "eps": 1e-8}]
    options = optimizer.group_options(SimpleNamespace(param_groups=groups))
    assert options == [{"lr": 0.1}, {"lr": 0.2, "eps": 1e-8}]
    loaded = SimpleNamespace(
        param_groups=[{"params": [5], "lr": 9.0, "step": 7}, {"params": [], "lr": 9.0, "eps": 1.0}]
    )
    optimizer.set_group_options(loaded, options)
    assert loaded.param_groups == [{"params": [5], "lr": 0.1, "step": 7}, {"params": [], "lr": 0.2, "eps": 1e-8}]


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
    assert [chunk.training for chunk in policy.chunks] == [True]
    plain, hot = policy.logprobs(batch, ROWS), policy.logprobs(batch, ROWS, temperature=3.0)
    assert plain.dtype == np.float32 and plain.shape == batch.loss_mask_R.shape
    assert np.abs(plain - hot).max() > 0.1 and np.array_equal(policy.run_pass("old_logprobs", batch, ROWS), plain)
    assert [chunk.training for chunk in policy.chunks] == [True]
    policy.chunks[0].eval()
    policy.logprobs(batch, ROWS)
    assert not policy.chunks[0].training


def test_a_token_outside_of_the_vocabulary_is_refused(model):
    batch = random_batch()
    tokens_T = batch.tokens_T.copy()
    tokens_T[-1] = 50
    with pytest.raises(DataError, match=r"ids from \d+ to 50, allowed 0 to 49"):
        policy_of(model, GRPO).logprobs(replace(batch, tokens_T=tokens_T), ROWS)


@pytest.mark.parametrize(("numbers", "refused"), [([-1, 3], False), ([-2, 3], True), ([0, 4], True), ([], False)])
def test_numbers_of_experts_are_those_of_the_model(numbers, refused):
    packed = SimpleNamespace(routed_experts_TLK=torch.tensor(numbers).view(-1, 1, 1))
    if not refused:
        forward.check_numbers(packed, 4)
        return
    with pytest.raises(DataError, match=f"numbered {min(numbers)} to {max(numbers)}; allowed: 0 to 3, and -1 where"):
        forward.check_numbers(packed, 4)


def test_a_disk_that_refuses_a_checkpoint_is_named(tmp_path, model, monkeypatch):
    policy = policy_of(model, GRPO)
    with pytest.raises(CheckpointError, match=r"could not be written: .*; free disk space, then --resume from"):
        checkpoint.start_save(policy.train_state, tmp_path / "nowhere")

    def refuse(_):
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(checkpoint.ShardFile, "write", refuse)
    policy.start_save(tmp_path)
    (pending,) = policy._pending_saves
    assert pending._thread.name == "checkpoint" and pending._thread.daemon, "who ends the process does not wait for it"
    assert pending._most_copied == 2 * sum(parameter.numel() for parameter in policy._parameters())
    policy.end_background_work()
    assert not pending._thread.is_alive()
    with pytest.raises(CheckpointError, match=rf"^checkpoint {tmp_path} could not be written: .*the disk is full"):
        policy.finish_save()


def test_a_save_and_the_end_of_a_rank_wait_for_the_save_before(tmp_path, model, monkeypatch):
    policy, waited, wait = policy_of(model, GRPO), [], checkpoint.PendingSave.wait
    monkeypatch.setattr(checkpoint.PendingSave, "wait", lambda self: (waited.append(self), wait(self)))
    policy.start_save(tmp_path / "one")
    (first,) = policy._pending_saves
    policy.start_save(tmp_path / "two")
    assert waited == [first] and first not in policy._pending_saves
    policy.end_background_work()
    assert waited == [first, *policy._pending_saves]
    policy.finish_save()


def test_an_update_waits_for_what_a_save_reads(tmp_path, model, monkeypatch):
    policy, seen, go = policy_of(model, GRPO), [], threading.Event()
    write = checkpoint.ShardFile.write
    monkeypatch.setattr(checkpoint.ShardFile, "write", lambda self: (go.wait(30), write(self)))
    monkeypatch.setattr(checkpoint.ShardFile, "release", lambda self, most: seen.append(most))
    policy.start_save(tmp_path)
    for call in (
        lambda: policy.train_step(random_batch(), ROWS, step=1),
        lambda: policy.offload(("gradients",)),
        lambda: policy.onload(KINDS_OF_MEMORY),
    ):
        call()
    go.set()
    policy.finish_save()
    assert len(seen) == 2, "an update and what leaves, not what comes back"
    policy.load(tmp_path)
    assert len(seen) == 3


def test_a_checkpoint_that_is_not_there_is_named(tmp_path, model):
    with pytest.raises(CheckpointError, match=r"metadata\.json cannot be read"):
        policy_of(model, GRPO).load(tmp_path)


@pytest.mark.parametrize(
    "error", [OSError, KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError, RuntimeError]
)
def test_a_state_that_is_not_the_algorithms_is_refused_by_name(tmp_path, error):
    def load_state_dict(state):
        assert state == {"a": 1}
        raise error("no")

    algorithm = SimpleNamespace(name="mine", load_state_dict=load_state_dict)
    (tmp_path / "algorithm.json").write_text('{"a": 1}')
    words = rf"algorithm\.json: not the state of algorithm mine \({error.__name__}: .*no.*\): edited, or of another"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load_algorithm(algorithm, tmp_path / "algorithm.json")


def test_an_error_of_ours_is_left_as_it_is(tmp_path):
    def load_state_dict(_):
        raise AlgorithmError("K differs")

    (tmp_path / "algorithm.json").write_text("{}")
    with pytest.raises(AlgorithmError, match=r"^K differs$"):
        checkpoint.load_algorithm(
            SimpleNamespace(name="a", load_state_dict=load_state_dict), tmp_path / "algorithm.json"
        )


def test_boxes_that_are_no_whole_tensor_together_are_not_saved(tmp_path):
    boxes = [checkpoint.OwnBox("w", torch.zeros(4), (at,), (4,), (9,)) for at in (0, 4)]
    with pytest.raises(CheckpointError, match=r"^w: 8 elements were to be written, of \(9,\)$"):
        checkpoint.collect_shards({}, tmp_path, boxes)
    whole = [*boxes, checkpoint.OwnBox("w", torch.zeros(1), (8,), (1,), (9,))]
    checkpoint.collect_shards({}, tmp_path, whole).write()


def test_rows_that_only_pad_may_be_of_another_number(tmp_path):
    rows = torch.arange(12.0).reshape(6, 2)
    stored = checkpoint.ShardedTensor.from_rank_offsets("w", rows, allow_shape_mismatch=True)
    checkpoint.collect_shards([stored], tmp_path).write()
    wanted = checkpoint.ShardedTensor.from_rank_offsets("w", torch.ones(8, 2), allow_shape_mismatch=True)
    (found,) = checkpoint.read_shards([wanted], tmp_path)
    assert torch.equal(found, torch.cat([rows, torch.zeros(2, 2)]))
