"""PPO's advantages, targets and losses against recursions in plain Python and TRL's formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.algo.advantages import overlong_filter
from megatron_daro.algo.algorithm import StepTotals
from megatron_daro.algo.objective import ObjectiveSettings, token_objective
from megatron_daro.algo.ppo import Ppo, value_losses
from megatron_daro.algo.token_columns import TokenColumns
from megatron_daro.algo.weighting import StepStats, make_algorithm
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import AlgorithmError


def build(**options):
    return Ppo(rollouts_per_prompt=2, max_response_tokens=64, **options)


def columns(values, masks, rewards, truncated=None, sum_over_step=lambda values: values, token_rewards=None):
    """TokenColumns of samples given as lists."""
    mask_R = torch.tensor([bool(m) for mask in masks for m in mask])
    values_R = torch.tensor([v for row in values for v in row], dtype=torch.float64)
    count = len(rewards)
    return TokenColumns(
        mask_R=mask_R,
        columns={"values": torch.where(mask_R, values_R, 0.0)},
        lengths_N=torch.tensor([len(mask) for mask in masks]),
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        advantages_N=torch.zeros(count, dtype=torch.float64),
        bins_N=torch.zeros(count, dtype=torch.int64),
        group_ids_N=torch.zeros(count, dtype=torch.int64),
        truncated_N=torch.tensor(truncated or [False] * count),
        sum_over_step=sum_over_step,
        token_rewards_R=None if token_rewards is None else flat(token_rewards) * mask_R,
    )


def flat(rows):
    return torch.tensor([v for row in rows for v in row], dtype=torch.float64)


def recursion(values, mask, reward, gamma, lam, goes_on=False, token_rewards=None):
    """Advantages of one sample, from its end to its start, one own token at a time; 0 elsewhere."""
    advantages, following, next_value, first = [0.0] * len(mask), 0.0, 0.0, True
    for t in reversed(range(len(mask))):
        if not mask[t]:
            continue
        if first and goes_on:
            next_value, first = values[t], False
            continue
        delta = (reward if first else 0.0) + gamma * next_value - values[t]
        delta += token_rewards[t] if token_rewards else 0.0
        following = delta + gamma * lam * following
        advantages[t], next_value, first = following, values[t], False
    return advantages


def random_samples(seed, count):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    masks = [(rng.random(n) < 0.7).astype(int).tolist() for n in lengths]
    values = [rng.normal(size=n).tolist() for n in lengths]
    return values, masks, rng.integers(0, 2, count).astype(float).tolist(), (rng.random(count) < 0.5).tolist()


@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 6), gamma=st.floats(0, 1), lam=st.floats(0, 1), cut=st.booleans(),
    own=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_advantages_and_targets_equal_the_recursion(seed, count, gamma, lam, cut, own):
    values, masks, rewards, truncated = random_samples(seed, count)
    token_rewards = [[0.3 * v * v - 0.1 for v in row] for row in values] if own else [None] * count
    tokens = columns(values, masks, rewards, truncated, token_rewards=token_rewards if own else None)
    algorithm = build(gamma=gamma, gae_lambda=lam, critic_lambda=0.5 * lam, whiten=False, bootstrap_truncated=cut)
    want, aims = [], []
    for row, mask, reward, ended, of_tokens in zip(values, masks, rewards, truncated, token_rewards, strict=True):
        want += recursion(row, mask, reward, gamma, lam, cut and ended, of_tokens)
        errors = recursion(row, mask, reward, gamma, 0.5 * lam, cut and ended, of_tokens)
        aims += [m * (e + v) for m, e, v in zip(mask, errors, row, strict=True)]
    assert algorithm.token_advantages(tokens).tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert algorithm.value_targets(tokens).tolist() == pytest.approx(aims, rel=1e-12, abs=1e-12)


def test_by_hand_with_turns_in_the_middle():
    """Own tokens 0, 1, 4 with values 0.5, 0.25, 1; what the environment wrote (2, 3) is as if it were not there."""
    tokens = columns([[0.5, 0.25, 9.0, 9.0, 1.0]], [[1, 1, 0, 0, 1]], [2.0])
    algorithm = build(gamma=0.5, gae_lambda=0.5, whiten=False)
    last = 2.0 - 1.0
    middle = 0.5 * 1.0 - 0.25 + 0.25 * last
    first = 0.5 * 0.25 - 0.5 + 0.25 * middle
    assert algorithm.token_advantages(tokens).tolist() == [first, middle, 0.0, 0.0, last]
    assert algorithm.value_targets(tokens).tolist() == [first + 0.5, middle + 0.25, 0.0, 0.0, last + 1.0]


def test_with_neither_discount_nor_trace_decay_it_is_the_reward_less_the_value():
    """Open-Reasoner-Zero's setting, the default: the target of every token is the reward."""
    values, masks, rewards, _ = random_samples(3, 5)
    tokens, algorithm = columns(values, masks, rewards), build(whiten=False)
    want = [
        m * (r - v) for row, mask, r in zip(values, masks, rewards, strict=True) for v, m in zip(row, mask, strict=True)
    ]
    assert algorithm.token_advantages(tokens).tolist() == pytest.approx(want, abs=1e-12)
    per_token = [r * m for mask, r in zip(masks, rewards, strict=True) for m in mask]
    assert algorithm.value_targets(tokens).tolist() == pytest.approx(per_token, abs=1e-12)


def test_a_truncated_answer_ends_there_unless_it_shall_go_on():
    values, masks = [[0.1, 0.2, 0.4], [0.3]], [[1, 1, 1], [1]]
    tokens = columns(values, masks, [1.0, 1.0], [True, True])
    ended = build(whiten=False).token_advantages(tokens).tolist()
    assert ended == pytest.approx([0.9, 0.8, 0.6, 0.7])
    goes_on = build(whiten=False, bootstrap_truncated=True)
    assert goes_on.token_advantages(tokens).tolist() == pytest.approx([0.3, 0.2, 0.0, 0.0]), "towards the last value"
    assert goes_on.value_targets(tokens).tolist() == pytest.approx([0.4, 0.4, 0.4, 0.3])
    after = build(bootstrap_truncated=True).token_advantages(tokens).tolist()
    assert after[2:] == [0.0, 0.0], "what has no advantage gets none by whitening"
    assert after[:2] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)


def test_lambda_by_length():
    """alpha 0.1: 17 own tokens have lambda 1 - 1/1.7; 5 would have one below 0, so 0."""
    rng = np.random.default_rng(1)
    values, masks = [rng.normal(size=17).tolist(), rng.normal(size=5).tolist()], [[1] * 17, [1] * 5]
    tokens, algorithm = columns(values, masks, [1.0, 0.0]), build(length_factor=0.1, whiten=False)
    want = recursion(values[0], masks[0], 1.0, 1.0, 1 - 1 / 1.7) + recursion(values[1], masks[1], 0.0, 1.0, 0.0)
    assert algorithm.token_advantages(tokens).tolist() == pytest.approx(want, abs=1e-12)
    assert algorithm.value_targets(tokens).tolist() == pytest.approx([1.0] * 17 + [0.0] * 5), "the critic's own is 1"


@pytest.mark.parametrize("masks", [[[1], [1]], [[1], [0]], [[0], [0]], [[0, 0, 0], [1]]])
def test_answers_of_one_token_and_of_none(masks):
    values = [[0.25] * len(mask) for mask in masks]
    got = build().token_advantages(columns(values, masks, [1.0, 0.0]))
    assert torch.isfinite(got).all()
    raw = build(whiten=False).token_advantages(columns(values, masks, [1.0, 0.0])).tolist()
    want = [m * (r - 0.25) for mask, r in zip(masks, (1.0, 0.0), strict=True) for m in mask]
    assert raw == want


def test_whitening_is_over_all_ranks_of_the_step():
    values, masks, rewards, _ = random_samples(5, 8)
    whole = build().token_advantages(columns(values, masks, rewards))
    parts = [slice(0, 3), slice(3, 8)]
    sums: list[torch.Tensor] = []

    def shares(where, seen):
        """The sums of both ranks, replayed to each in its own order of calls."""
        calls = iter(seen)
        return columns(values[where], masks[where], rewards[where], sum_over_step=lambda own: next(calls, own))

    def recorded(where, known):
        own: list[torch.Tensor] = []
        replies = iter(known)

        def record(value):
            own.append(value)
            return next(replies, value)

        build().token_advantages(columns(values[where], masks[where], rewards[where], sum_over_step=record))
        return own

    for call in range(2):
        sums.append(sum(recorded(where, sums)[call] for where in parts))
    got = torch.cat([build().token_advantages(shares(where, sums)) for where in parts])
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-12)
    trained = whole[torch.tensor([bool(m) for mask in masks for m in mask])]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(trained.std(correction=1)) == pytest.approx(1.0, rel=1e-6)


def test_clipped_value_loss_by_hand():
    values, old, targets = (torch.tensor(x) for x in ([1.0, 0.3, -1.0], [0.0, 0.0, 0.0], [2.0, 1.0, -2.0]))
    losses, clipped = value_losses(values, old, targets)
    assert losses.tolist() == pytest.approx([0.5, 0.245, 0.5]) and not clipped.any()
    losses, clipped = value_losses(values, old, targets, clip=0.5)
    assert losses.tolist() == pytest.approx([0.5 * 1.5**2, 0.245, 0.5 * 1.5**2])
    assert clipped.tolist() == [True, False, True]
    moved = torch.tensor([1.0], requires_grad=True)
    value_losses(moved, torch.zeros(1), torch.tensor([2.0]), clip=0.5)[0].sum().backward()
    assert moved.grad.tolist() == [0.0], "a value that was stopped is not pulled further"


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_policy_and_value_loss_equal_trls(beta):
    """TRL 0.19.1, trainer/ppo_trainer.py, lines 510 to 534 (rewards less beta times k1 of each token, the score on the
    last; advantages, whitened as core.py, 51 to 76, has it), 566 to 574 (critic) and 580 to 584 (policy), in loops;
    with the options that agree: both clips 0.2."""
    values, _, rewards, _ = random_samples(11, 4)
    masks = [[1] * len(row) for row in values]
    gamma, lam, eps = 0.99, 0.95, 0.2
    rng = np.random.default_rng(2)
    flat = sum(len(row) for row in values)
    old_R, new_R, moved_R = (torch.tensor(rng.normal(size=flat) * s - 1) for s in (0.3, 0.3, 0.8))
    kl = [[beta * (v * v - 0.2) for v in row] for row in values]
    given = [[-value for value in row] for row in kl]
    algorithm = build(gamma=gamma, gae_lambda=lam)
    tokens = columns(values, masks, rewards, token_rewards=given if beta else None)
    advantages_R, targets_R = algorithm.token_advantages(tokens), algorithm.value_targets(tokens)

    raw = [
        a for row, less, mask, r in zip(values, kl, masks, rewards, strict=True)
        for a in recursion(row, mask, r, gamma, lam, token_rewards=[-value for value in less])
    ]  # fmt: skip
    flat_values = [v for row in values for v in row]
    mean = sum(raw) / flat
    variance = sum((a - mean) ** 2 for a in raw) / flat * (flat / (flat - 1))
    policy = critic = 0.0
    for a, v, old, new, moved in zip(raw, flat_values, old_R.tolist(), new_R.tolist(), moved_R.tolist(), strict=True):
        white, ratio = (a - mean) / math.sqrt(variance + 1e-8), math.exp(new - old)
        policy += max(-white * ratio, -white * min(max(ratio, 1 - eps), 1 + eps)) / flat
        near = min(max(moved, v - eps), v + eps)
        critic += 0.5 * max((moved - (a + v)) ** 2, (near - (a + v)) ** 2) / flat

    sample_R = torch.arange(4).repeat_interleave(tokens.lengths_N)
    objective = token_objective(
        new_R,
        torch.zeros(flat, dtype=torch.float64),
        old_logprobs_T=old_R,
        rollout_logprobs_T=old_R,
        ref_logprobs_T=None,
        advantages_T=advantages_R,
        mask_T=torch.ones(flat, dtype=torch.float64),
        sample_T=sample_R,
        num_samples=4,
        settings=ObjectiveSettings(clip_low=eps, clip_high=eps),
    )
    bins_N = torch.zeros(4, dtype=torch.int64)
    totals = StepTotals.of(bins_N, tokens.lengths_N, 2)
    coefficients_N = algorithm.bin_coefficients(bins_N, tokens.lengths_N, totals)
    assert float((coefficients_N * objective.sample_losses_M).sum()) == pytest.approx(policy, rel=1e-10)
    losses, _ = value_losses(moved_R, torch.tensor(flat_values, dtype=torch.float64), targets_R, clip=eps)
    assert float(losses.sum() / flat) == pytest.approx(critic, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma: got 1.5"),
        ({"gae_lambda": -0.1}, "gae_lambda: got -0.1"),
        ({"critic_lambda": float("nan")}, "critic_lambda: got nan"),
        ({"length_factor": 0.0}, "length_factor: got 0.0"),
        ({"std": "population"}, "std: got 'population'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(AlgorithmError, match=message):
        build(**options)


def test_filtered_answers_have_no_part():
    """An overlong answer whose mask is 0 changes no other's advantage."""
    values, masks, rewards = [[0.1, 0.4], [5.0, 7.0]], [[1, 1], [1, 1]], [1.0, 0.0]
    mask_R = overlong_filter(np.ones(4, dtype=np.uint8), np.array([2, 2]), np.array([0, 1]))
    kept = build().token_advantages(columns(values, [mask_R[:2], mask_R[2:]], rewards))
    alone = build().token_advantages(columns(values[:1], masks[:1], rewards[:1]))
    assert kept[:2].tolist() == alone.tolist() and not kept[2:].any()


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(AlgorithmError, match=r"rewards_N\[1\]: got nan"):
        build().advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))


def test_daros_weights_take_ppos_options_and_learn_as_ever():
    section = AlgorithmSection(name="daro_ppo", daro={"clamp": (0.5, 2.0)}, options={"gamma": 0.5, "whiten": False})
    algorithm = make_algorithm(**section.arguments(rollouts_per_prompt=2, max_response_tokens=64))
    assert section.has_critic and algorithm.difficulty.clamp == (0.5, 2.0)
    tokens = columns([[0.1, 0.4], [1.0, 2.0]], [[1, 1], [1, 1]], [1.0, 0.0])
    plain = build(gamma=0.5, whiten=False)
    assert algorithm.token_advantages(tokens).tolist() == plain.token_advantages(tokens).tolist()
    assert algorithm.value_targets(tokens).tolist() == plain.value_targets(tokens).tolist()
    assert algorithm.keep(torch.tensor([0, 1, 2])).tolist() == [False, True, False]
    totals = StepTotals.of(torch.tensor([1]), torch.tensor([4]), 2)
    sums = totals.tokens_per_bin * 0.3
    algorithm.learn(StepStats.of_bins(totals, sums, sums))
    assert algorithm.weights[1] > 1
    other = make_algorithm(**section.arguments(rollouts_per_prompt=2, max_response_tokens=64))
    other.load_state_dict(algorithm.state_dict())
    assert torch.equal(other.weights, algorithm.weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 2.0}, "gamma: got 2.0"),
        ({"std": "population"}, "std: got 'population'"),
    ],
)
def test_daros_weights_refuse_ppos_options_out_of_range(options, message):
    with pytest.raises(AlgorithmError, match=message):
        make_algorithm("daro_ppo", rollouts_per_prompt=2, max_response_tokens=64, **options)
