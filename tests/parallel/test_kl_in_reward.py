"""KL in the reward: each rank makes the advantages of the whole step from rewards less the KL of its columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_tasks
import pytest
from heavy_cases import mostly_heavy
from loss_reference import reference
from small_models import ROLLOUTS, save_model
from test_gradients_exact import layouts, merged, relative_difference
from test_loss_terms import LAYOUTS, TOLERANCE, batch_with_reference

BETA = 0.3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_reward_kl")
    return directory, save_model("qwen2", directory)


def algorithm(estimator="k1"):
    return {"name": "grpo", "kl": {"coefficient": BETA, "estimator": estimator, "place": "reward"}}


def answer_kl(batch, i, estimator):
    one, total = batch.select([i]), 0.0
    for old, ref, trained in zip(one.old_logprobs_R, one.ref_logprobs_R, one.loss_mask_R, strict=True):
        d = float(old) - float(ref)
        total += {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator] if trained else 0.0
    return total


def advantages(batch, estimator):
    """Group by group: rewards less beta times the KL, centred, over their deviation."""
    rewards = [float(r) - BETA * answer_kl(batch, i, estimator) for i, r in enumerate(batch.rewards_N)]
    found = []
    for i, group in enumerate(batch.group_ids_N):
        own = [r for r, other in zip(rewards, batch.group_ids_N, strict=True) if other == group]
        assert len(own) == ROLLOUTS
        mean = sum(own) / ROLLOUTS
        deviation = (sum((r - mean) ** 2 for r in own) / ROLLOUTS) ** 0.5
        found.append((rewards[i] - mean) / (deviation + 1e-6))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("layout", mostly_heavy(LAYOUTS, "single", "cp2_dp2"))
def test_gradients_are_those_of_the_reduced_rewards(rank_pool, model, layout, estimator):
    batch = batch_with_reference()
    want = reference(model[1], replace(batch, advantages_N=advantages(batch, estimator)), {"name": "grpo"})
    plain = reference(model[1], batch, {"name": "grpo"})
    results = rank_pool.run(
        policy_tasks.loss_terms,
        layouts()[layout],
        path=model[0],
        batch=batch,
        num_micro_batches=4,
        algorithm=algorithm(estimator),
    )
    assert relative_difference(merged(results), want.gradients) < TOLERANCE
    assert relative_difference(plain.gradients, want.gradients) > 0.1, "the KL does not matter in this batch"
    for result in results:
        assert result["policy_loss"] == pytest.approx(want.policy_loss, rel=TOLERANCE)
        assert result["regularizer"] == 0.0


def test_what_is_missing_or_not_finite(rank_pool, model):
    batch = batch_with_reference()
    (error,) = rank_pool.run(
        policy_tasks.error_of_a_step,
        layouts()["single"],
        path=model[0],
        batch=replace(batch, ref_logprobs_R=None),
        algorithm=algorithm(),
    )
    assert "kl.place: got 'reward'" in error and "ref_logprobs" in error
    per_token = {"name": "grpo", "kl": {"coefficient": BETA, "place": "token_reward"}}
    for lacking, words in (({"ref_logprobs_R": None}, "ref_logprobs"), ({}, "grpo")):
        (error,) = rank_pool.run(
            policy_tasks.error_of_a_step,
            layouts()["single"],
            path=model[0],
            batch=replace(batch, **lacking),
            algorithm=per_token,
        )
        assert "kl.place: got 'token_reward'" in error and words in error
    trained = int(np.flatnonzero(batch.loss_mask_R)[0])
    poisoned = batch.ref_logprobs_R.copy()
    poisoned[trained] = np.nan
    for layout in ("single", "dp2"):
        for said in rank_pool.run(
            policy_tasks.error_of_a_step,
            layouts()[layout],
            path=model[0],
            batch=replace(batch, ref_logprobs_R=poisoned),
            algorithm=algorithm(),
        ):
            assert said.startswith("skipped: kl.place reward: 1 of the step's")
