"""What losses are made of: rewards less the KL, advantages per token and a critic's targets, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import ROLLOUTS, random_batch

from megatron_daro.actor import advantages
from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import AlgorithmError, NonFiniteError

BETA, GAMMA, LAMBDA, ITS_LAMBDA = 0.3, 0.97, 0.9, 0.95
PPO = {"name": "ppo", "options": {"gamma": GAMMA, "gae_lambda": LAMBDA, "critic_lambda": ITS_LAMBDA}}

pytestmark = pytest.mark.usefixtures("world")


def made(batch, *, beta=BETA, place="reward", estimator="k1", **section):
    """The batch as `with_advantages` gives it back."""
    kl = {"coefficient": beta, "estimator": estimator, "place": place}
    section = AlgorithmSection(**{"name": "grpo", "kl": kl, **section})
    algorithm = make_algorithm(**section.arguments(rollouts_per_prompt=ROLLOUTS, max_response_tokens=32))
    return advantages.with_advantages(algorithm, batch, objective_settings(section, algorithm))


@pytest.fixture(scope="module")
def batch():
    """With reference log-probs and values, and numbers that are none where nothing is trained."""
    batch, rng = random_batch(), np.random.default_rng(3)
    ref_R = batch.old_logprobs_R + rng.normal(size=len(batch.old_logprobs_R)).astype(np.float32) * 0.5
    values_R = rng.normal(size=len(ref_R)).astype(np.float32)
    columns = {"ref_logprobs_R": ref_R, "values_R": values_R, "old_logprobs_R": batch.old_logprobs_R}
    masked = batch.loss_mask_R == 0
    assert masked.any()
    columns = {name: np.where(masked, np.nan, values).astype(np.float32) for name, values in columns.items()}
    return replace(batch, **columns)


def kl_of(sample, estimator):
    """Of each token; 0 where nothing is trained."""
    d_R = np.where(sample.loss_mask_R > 0, sample.old_logprobs_R.astype(float) - sample.ref_logprobs_R, 0.0)
    return {"k1": d_R, "k3": np.exp(-d_R) - 1 + d_R}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_rollout_has_the_advantage_of_its_reward_less_the_kl_of_its_trained_tokens(batch, estimator):
    samples = [batch.select([i]) for i in range(len(batch))]
    wanted = np.array([s.rewards_N[0] - BETA * kl_of(s, estimator).sum() for s in samples])
    found = made(batch, estimator=estimator)
    np.testing.assert_allclose(found.rewards_N, wanted, rtol=1e-5, atol=1e-6)
    assert found.rewards_N.dtype == found.advantages_N.dtype == np.float32
    for group in set(batch.group_ids_N.tolist()):
        own = batch.group_ids_N == group
        centred = wanted[own] - wanted[own].mean()
        np.testing.assert_allclose(found.advantages_N[own], centred / (wanted[own].std() + 1e-6), rtol=1e-4, atol=1e-4)


def test_without_a_coefficient_nothing_is_changed(batch):
    assert made(batch, beta=0.0) is batch
    assert made(batch, place="loss") is batch


def recursion(sample, lam, beta):
    """Advantages of the trained tokens, last to first, as GAE is written; the reward stands at the last one."""
    mask, kl, found, following, later, first = sample.loss_mask_R, kl_of(sample, "k1"), {}, 0.0, 0.0, True
    for t in reversed(range(len(mask))):
        if mask[t]:
            reward = (float(sample.rewards_N[0]) if first else 0.0) - beta * kl[t]
            following = reward + GAMMA * later - sample.values_R[t] + GAMMA * lam * following
            found[t], later, first = following, float(sample.values_R[t]), False
    return found


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_each_token_of_ppo_has_its_own_advantage_and_target(batch, beta):
    found = made(batch, beta=beta, place="token_reward", **PPO)
    samples = [batch.select([i]) for i in range(len(batch))]
    raw = np.array([a for s in samples for _, a in sorted(recursion(s, LAMBDA, beta).items())])
    errors = np.array([a for s in samples for _, a in sorted(recursion(s, ITS_LAMBDA, beta).items())])
    trained = batch.loss_mask_R > 0
    white = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found.token_advantages_R[trained], white, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.value_targets_R[trained], errors + batch.values_R[trained], rtol=1e-4, atol=1e-5)
    for column_R in (found.token_advantages_R, found.value_targets_R):
        assert column_R.dtype == np.float32 and not column_R[~trained].any()


def test_an_algorithm_without_values_gets_no_targets(batch):
    found = made(batch, beta=0.0, name="toy_algorithm:Fluent", options={"scale": 0.3, "discount": 0.8})
    assert found.token_advantages_R is not None and found.value_targets_R is None


class Looks:
    """Puts down what an algorithm is shown."""

    name, token_columns = "looks", ("ref_logprobs",)

    def token_advantages(self, tokens):
        self.shown = tokens
        return torch.zeros(len(tokens.mask_R))


def test_an_algorithm_is_shown_the_samples_of_its_tokens(batch):
    batch = replace(batch, truncated_N=(np.arange(len(batch)) % 3 == 0).astype(np.uint8))
    looks = Looks()
    advantages.with_token_advantages(looks, batch)
    shown = looks.shown
    assert shown.mask_R.tolist() == [bool(m) for m in batch.loss_mask_R]
    assert shown.truncated_N.tolist() == [i % 3 == 0 for i in range(len(batch))]
    for name in ("bins_N", "group_ids_N", "rewards_N", "advantages_N"):
        assert getattr(shown, name).tolist() == getattr(batch, name).tolist(), name
    assert shown.lengths_N.tolist() == batch.response_lengths_N.tolist()
    assert shown.rewards_N.dtype == shown.advantages_N.dtype == torch.float64
    column_R = shown.columns["ref_logprobs"]
    assert column_R.dtype == torch.float64 and column_R.isfinite().all() and shown.token_rewards_R is None


@pytest.mark.parametrize(
    ("lacking", "section", "words"),
    [
        ("ref_logprobs_R", {}, r"kl\.place: got 'reward', .*ref_logprobs"),
        ("old_logprobs_R", {}, r"kl\.place: got 'reward', .*old_logprobs"),
        ("", {"place": "token_reward"}, r"kl\.place: got 'token_reward' .*grpo"),
        ("values_R", {"beta": 0.0, **PPO}, r"ppo, token_columns: got 'values'"),
    ],
)
def test_what_was_not_computed_is_refused_by_name(batch, lacking, section, words):
    with pytest.raises(AlgorithmError, match=words):
        made(replace(batch, **({lacking: None} if lacking else {})), **section)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("long", r"got torch\.float64 \[{twice}\].*\[{tokens}\]"),
        ("list", r"got list"),
        ("integers", r"got torch\.int64"),
        ("raises", r"ZeroDivisionError: no token to divide by"),
    ],
)
def test_advantages_that_do_not_fit_are_refused_by_name(batch, fault, words):
    tokens = len(batch.loss_mask_R)
    words = f"faulty, token_advantages: {words}".format(tokens=tokens, twice=2 * tokens)
    with pytest.raises(AlgorithmError, match=words):
        made(batch, beta=0.0, name="toy_algorithm:Faulty", options={"fault": fault})


def test_trained_tokens_without_a_number_are_counted(batch):
    row = int(np.flatnonzero(batch.trained_tokens_N > 1)[0])
    rewards_N = np.where(np.arange(len(batch)) == row, 7, batch.rewards_N).astype(np.float32)
    count = int(batch.trained_tokens_N[row])
    with pytest.raises(NonFiniteError, match=f"faulty, token_advantages: {count} "):
        made(replace(batch, rewards_N=rewards_N), beta=0.0, name="toy_algorithm:Faulty", options={"fault": "nan"})
    elsewhere = {"name": "toy_algorithm:Faulty", "options": {"fault": "nan where nothing is trained"}}
    assert np.isfinite(made(batch, beta=0.0, **elsewhere).token_advantages_R).all()
    broken = replace(batch, values_R=np.where(batch.loss_mask_R > 0, np.inf, 0).astype(np.float32))
    with pytest.raises(NonFiniteError, match="ppo, token_advantages"):
        made(broken, beta=0.0, **PPO)


def test_rewards_that_are_not_finite_with_the_kl_are_counted(batch):
    ref_R = batch.ref_logprobs_R.copy()
    ref_R[np.flatnonzero(batch.loss_mask_R)[0]] = np.inf
    with pytest.raises(NonFiniteError, match=r"kl\.place reward: 1 "):
        made(replace(batch, ref_logprobs_R=ref_R))
