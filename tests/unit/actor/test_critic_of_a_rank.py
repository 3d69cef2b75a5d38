"""A critic on one rank: where it starts, what it learns from, its metrics, and its turns with the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_tasks import device_bytes, everything, uneven_split
from safetensors.torch import load_file, save_file
from single_rank import policy_of, save_random_model, with_passes
from small_models import ROLLOUTS, random_batch

from megatron_daro.actor import critic_metrics, shard_file
from megatron_daro.actor.advantages import with_advantages
from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import CheckpointError, ModelError
from megatron_daro.routed_experts import StoredExperts
from megatron_daro.types import KINDS_OF_MEMORY

CLIP = 0.2

pytestmark = pytest.mark.usefixtures("world")


def ppo(path=None, **critic):
    return {"name": "ppo", "critic": {**({"path": str(path)} if path else {}), **critic}}


def with_targets(policy, batch, section):
    """The batch with advantages per token and what the critic's values shall become."""
    return with_advantages(
        policy.train_state.algorithm,
        batch,
        objective_settings(AlgorithmSection(**section), policy.train_state.algorithm),
    )


@pytest.fixture(scope="module")
def prepared(world, model, critic_model):
    """A policy with a critic, a batch with values that its critic is some way from, and targets; micro-batches."""
    policy = policy_of(model, ppo(critic_model, value_clip=CLIP), optimizer={"distributed": False})
    batch = random_batch()
    micro_batches = uneven_split(len(batch), 3)
    values_R = policy.values(batch, micro_batches)
    noise_R = np.random.default_rng(4).normal(size=len(values_R)).astype(np.float32) * 0.4
    batch = with_targets(policy, replace(batch, values_R=values_R + noise_R), ppo(critic_model, value_clip=CLIP))
    return policy, batch, micro_batches, values_R


def test_experts_of_the_policys_tokens_are_none_of_its_own(prepared):
    policy, batch, micro_batches, values_R = prepared
    experts_N = tuple(StoredExperts((), (int(n), 9, 9)) for n in batch.lengths_N)  # in no file: nobody may read them
    batch = replace(batch, routed_experts_N=experts_N)
    np.testing.assert_array_equal(policy.critic.values(batch, micro_batches), values_R)
    assert policy.critic.gradients(batch, micro_batches).fit


def test_a_step_without_trained_tokens_has_no_loss(prepared):
    policy, batch, micro_batches, _ = prepared
    silent = replace(batch, loss_mask_R=np.zeros_like(batch.loss_mask_R))
    report = policy.critic.gradients(silent, micro_batches)
    assert report.metrics["critic/loss"] == 0.0 and "critic/value_mean" not in report.metrics


def test_targets_that_are_no_numbers_are_not_fit_for_an_update(prepared):
    policy, batch, micro_batches, _ = prepared
    targets_R = batch.value_targets_R * np.nan
    assert not policy.critic.gradients(replace(batch, value_targets_R=targets_R), micro_batches).fit


def test_an_update_follows_the_gradients_at_the_critics_own_rate(model, critic_model):
    section = ppo(critic_model, learning_rate=1e-3, warmup_steps=2, grad_clip=0.01)
    policy = policy_of(model, section, optimizer={"learning_rate": 1e-2, "weight_decay": 0.0})
    batch = random_batch()
    micro_batches = uneven_split(len(batch), 2)
    batch = with_passes(policy, batch, micro_batches)
    its = policy.critic
    batch = with_targets(policy, batch, section)
    before = everything(policy)
    report = its.gradients(batch, micro_batches)
    assert its.apply(report) == {"critic/learning_rate": pytest.approx(5e-4)}
    assert trained_on(policy, before) == {"critic"}


def columns_batch():
    """Values, targets and advantages of 24 answers, of some of which no token is trained."""
    batch, rng = random_batch(), np.random.default_rng(7)
    columns = rng.normal(size=(3, len(batch.loss_mask_R))).astype(np.float32)
    names = ("values_R", "value_targets_R", "token_advantages_R")
    return replace(batch, **dict(zip(names, columns, strict=True)))


def written_out(batch):
    """Token by token in plain Python."""
    found, values, targets = {}, [], []
    for i in range(len(batch)):
        s = batch.select([i])
        own = np.flatnonzero(s.loss_mask_R)
        side, k = "right" if s.correct_N[0] else "wrong", int(s.bins_N[0])
        for j, t in enumerate(own.tolist()):
            value, target, advantage = (float(c[t]) for c in (s.values_R, s.value_targets_R, s.token_advantages_R))
            values.append(value), targets.append(target)
            numbers = {"value": value, "target": target, "advantage": advantage, "advantage_abs": abs(advantage)}
            for name, number in numbers.items():
                found.setdefault(f"critic/{name}/{k}", []).append(number)
            found.setdefault(f"critic/value_{side}/{10 * j // len(own)}", []).append(value)
    metrics = {name: sum(numbers) / len(numbers) for name, numbers in found.items()}
    metrics |= {"critic/value_mean": np.mean(values), "critic/target_mean": np.mean(targets)}
    errors = np.array(targets) - np.array(values)
    return metrics | {"critic/explained_variance": 1 - errors.var() / np.var(targets)}


def test_metrics_are_means_over_tokens_of_a_pass_rate_and_of_a_tenth_of_an_answer():
    batch = columns_batch()
    found, wanted = critic_metrics.column_metrics(batch), written_out(batch)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert {f"critic/value/{k}" for k in range(ROLLOUTS + 1)} <= found.keys()
    right = batch.select(np.flatnonzero(batch.correct_N).tolist())
    assert critic_metrics.column_metrics(right) == pytest.approx(written_out(right), rel=1e-6, abs=1e-9)


def test_targets_that_are_all_alike_cannot_be_explained():
    batch = columns_batch()
    alike = replace(batch, value_targets_R=np.ones_like(batch.values_R))
    assert "critic/explained_variance" not in critic_metrics.column_metrics(alike)
    assert critic_metrics.column_metrics(replace(batch, loss_mask_R=np.zeros_like(batch.loss_mask_R))) == {}


def test_it_starts_from_the_policys_checkpoint_and_says_0(model):
    policy, batch = policy_of(model, ppo()), random_batch()
    assert not policy.values(batch, [[0, 1, 2], list(range(3, len(batch)))]).any()
    names = dict(policy.export_critic())
    stored = load_file(model / "model.safetensors")
    assert names.keys() - stored.keys() == {"score.weight"} and not names["score.weight"].any()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in names.items() if name in stored)


@pytest.mark.parametrize(("bias", "refused"), [(0.0, False), (1.0, True)])
def test_only_a_head_with_a_bias_of_0_is_taken(tmp_path, model, critic_model, bias, refused):
    save_random_model(tmp_path, seed=1, head=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.bias": torch.full((1,), bias)}, tmp_path / "model.safetensors")
    if not refused:
        assert policy_of(model, ppo(tmp_path)).critic is not None
        return
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path: .*score\.bias"):
        policy_of(model, ppo(tmp_path))


def test_a_critic_of_a_tied_checkpoint_has_no_output_layer_to_tie(tmp_path, model):
    save_random_model(tmp_path, seed=2, tie_word_embeddings=True)
    policy = policy_of(model, ppo(tmp_path))
    assert policy.critic.shape.tie is False and policy.critic.chunks[0].output_layer.weight.shape == (1, 32)


def steps(policy, seeds, first=1):
    """Metrics of optimizer steps, without times."""
    found = []
    for step, seed in enumerate(seeds, first):
        batch = random_batch(seed=seed)
        micro_batches = uneven_split(len(batch), 2)
        result = policy.train_step(with_passes(policy, batch, micro_batches), micro_batches, step=step)
        assert not result.skipped, result.reason
        found.append(dict(result.metrics))
    return found


def trained_on(policy, before):
    """Which parts have changed, by the first word of their names."""
    after = everything(policy)
    return {name.split()[0] for name, value in after.items() if name in before and (value != before[name]).any()}


def test_the_policy_rests_in_the_critics_first_steps(model):
    policy = policy_of(model, ppo(pretrain_steps=1), optimizer={"learning_rate": 1e-3, "warmup_steps": 9})
    first = everything(policy)
    (alone,) = steps(policy, [0])
    assert trained_on(policy, first) == {"critic"} and alone["optimizer/learning_rate"] == 0.0
    (both,) = steps(policy, [0], first=2)
    assert {"parameter", "critic"} <= trained_on(policy, first)
    assert both["optimizer/learning_rate"] == pytest.approx(1e-3 / 9), "its warm-up begins with its own first step"
    assert both["critic/loss"] < alone["critic/loss"]


def test_the_policys_rate_decays_over_the_steps_in_which_it_is_trained(model):
    """Of 10 steps the critic has 8 for itself: after two of its own the policy's rate is the lowest."""
    optimizer = {"learning_rate": 1e-3, "schedule": "linear", "min_learning_rate_ratio": 0.5}
    policy = policy_of(model, ppo(pretrain_steps=8), optimizer=optimizer)
    rates = [m["optimizer/learning_rate"] for m in steps(policy, [0, 1], first=9)]
    assert rates == pytest.approx([7.5e-4, 5e-4])


def test_what_servers_were_given_comes_to_neither_of_two_that_take_turns(model):
    policy = policy_of(model, ppo(offload=True))
    (metrics,) = steps(policy, [0])
    assert metrics["timing/critic_turns_s"] > 0
    policy.offload(("gradients", "optimizer"))
    weights = sum(tensor.nbytes for _, tensor in policy.export())  # the policy's turn
    assert policy.offload(("gradients", "optimizer")).left == device_bytes(policy, "policy") < 1.1 * weights
    assert device_bytes(policy, "critic") == 0
    with pytest.raises(RuntimeError, match="gradients, optimizer"):
        policy.train_step(random_batch(), [[0]], step=2)
    policy.onload(KINDS_OF_MEMORY)
    steps(policy, [1], first=2)


def test_a_step_that_is_skipped_says_how_long_its_own_turns_took(model):
    policy, batch = policy_of(model, ppo(offload=True)), random_batch()
    micro_batches = [list(range(len(batch)))]
    batch = replace(with_passes(policy, batch, micro_batches), rewards_N=np.full_like(batch.rewards_N, np.inf))
    result = policy.train_step(batch, micro_batches, step=1)
    assert result.skipped and result.metrics["timing/critic_turns_s"] > 0


def test_a_snapshot_needs_both_models_on_the_device(model):
    with pytest.raises(RuntimeError, match=r"algorithm\.critic\.offload"):
        _ = policy_of(model, ppo(offload=True)).snapshot_bytes


def test_a_checkpoint_without_a_critic_is_refused_by_name(tmp_path, model):
    written = policy_of(model, {"name": "grpo"})
    written.start_save(tmp_path)
    written.finish_save()
    with pytest.raises(CheckpointError, match=r"no critic.*algorithm\.name=ppo"):
        policy_of(model, ppo()).load(tmp_path)


def test_a_disk_that_refuses_its_checkpoint_leaves_the_one_before(tmp_path, model, monkeypatch):
    policy, directory, write = policy_of(model, ppo()), tmp_path / "checkpoints/step_000002.tmp", shard_file.FileWriter

    def refuse(path, *arguments, **options):
        if path.parent != directory:
            raise OSError(28, "the disk is full")
        return write(path, *arguments, **options)

    directory.mkdir(parents=True)
    (directory.parent / "step_000001").mkdir()
    monkeypatch.setattr(shard_file, "FileWriter", refuse)
    policy.start_save(directory)
    with pytest.raises(CheckpointError, match=r"--resume$"):
        policy.finish_save()


def test_values_of_an_algorithm_without_a_critic_are_refused(model):
    policy, batch = policy_of(model, {"name": "grpo"}), random_batch()
    with pytest.raises(RuntimeError, match="no critic"):
        policy.values(batch, [[0]])
    with pytest.raises(RuntimeError, match="no critic"):
        policy.export_critic()
    with pytest.raises(RuntimeError, match=r"kl\.coefficient"):
        policy.reference_logprobs(batch, [list(range(len(batch)))])


def test_a_gradient_that_the_critic_cannot_use_stops_the_policy_too(model):
    """The reason names it; nothing changes."""
    policy = policy_of(model, ppo())
    batch = random_batch()
    micro_batches = [list(range(len(batch)))]
    batch = with_passes(policy, batch, micro_batches)
    parameter = policy.critic.chunks[0].output_layer.weight
    with torch.no_grad():
        parameter.fill_(float("inf"))
    before = everything(policy)
    result = policy.train_step(batch, micro_batches, step=1)
    assert result.skipped and "critic" in result.reason
    assert trained_on(policy, before) == set()
