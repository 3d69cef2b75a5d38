"""What papers print and the default is not: each option against the printed formula, in plain loops over floats."""

from __future__ import annotations

import math

import algo_reference as reference
import pytest
import torch

from megatron_daro.algo.algorithm import BatchTotals, Samples, StepStats
from megatron_daro.algo.objective import ObjectiveSettings, reinforce_loss
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import AlgorithmError, CheckpointError

K = 4


def build(name, **options):
    return make_algorithm(name, rollouts_per_prompt=K, max_response_tokens=8, **options)


def dgpo_step(seed, reward_of):
    samples = reference.random_step(seed, num_groups=5, k=K)
    for i, sample in enumerate(samples):
        sample.reward = reward_of(sample.correct, i)
    return samples


def dgpo_signal(samples, **options):
    """Coefficient times advantage of each sample: all that the loss sees of both."""
    algorithm = build("dgpo", **options)
    bins_N = torch.tensor(reference.bins(samples))
    lengths_N = torch.tensor([len(s.tokens) for s in samples])
    rewards_N = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    advantages_N = algorithm.advantages(rewards_N, torch.tensor([s.group for s in samples]))
    totals = BatchTotals.of(bins_N, lengths_N, K)
    return (algorithm.coefficients(Samples(bins_N, lengths_N, advantages_N), totals) * advantages_N).tolist()


def printed_dgpo(samples, deviation_of):
    """V e^(-mu/2) / sum over questions, times (r - mean) / MAD, over the tokens of the valid questions."""
    bins = reference.bins(samples)
    valid = {s.group: b / K for s, b in zip(samples, bins, strict=True) if 0 < b < K}
    tokens = sum(len(s.tokens) for s in samples if s.group in valid)
    softmax = sum(math.exp(-mu / 2) for mu in valid.values())
    signal = []
    for s in samples:
        if s.group not in valid or not s.tokens:
            signal.append(0.0)
            continue
        group = [other for other in samples if other.group == s.group]
        mean = sum(other.reward for other in group) / K
        centre = sum(deviation_of(other) for other in group) / K
        deviation = sum(abs(deviation_of(other) - centre) for other in group) / K
        weight = len(valid) * math.exp(-valid[s.group] / 2) / softmax
        signal.append(weight * (s.reward - mean) / deviation / tokens if deviation else 0.0)
    return signal


REWARDS = {
    "0 and 1": lambda right, i: float(right),
    "-1 and 1": lambda right, i: 2.0 * right - 1,
    "with a penalty": lambda right, i: right - 0.1 * (i % 5),
}


@pytest.mark.parametrize("rewards", REWARDS)
def test_dgpo_divides_by_the_deviation_of_rewards_or_of_verdicts(rewards):
    for seed in range(4):
        samples = dgpo_step(seed, REWARDS[rewards])
        of_rewards, of_verdicts = dgpo_signal(samples, deviation="rewards"), dgpo_signal(samples)
        assert of_rewards == pytest.approx(printed_dgpo(samples, lambda s: s.reward), rel=1e-12, abs=1e-15)
        assert of_verdicts == pytest.approx(printed_dgpo(samples, lambda s: s.correct), rel=1e-12, abs=1e-15)
        if rewards == "-1 and 1":
            assert of_verdicts == pytest.approx([2 * a for a in of_rewards], rel=1e-12)
    with pytest.raises(AlgorithmError, match="deviation: got 'mean', allowed are verdicts, rewards"):
        build("dgpo", deviation="mean")


def test_equal_rewards_have_no_deviation_and_no_advantage():
    ids_N, rewards_N = torch.tensor([3, 3, 3, 3]), torch.tensor([0.1, 0.1, 0.1, 0.1])
    assert build("dgpo", deviation="rewards").advantages(rewards_N, ids_N).tolist() == [0.0] * 4


def stats(right, rollouts):
    per_bin = torch.zeros(K + 1, dtype=torch.int64)
    per_bin[K], per_bin[0] = right, rollouts - right
    totals = BatchTotals(torch.ones(K + 1, 1, dtype=torch.int64), per_bin)
    return StepStats(totals, {}, torch.zeros(0, dtype=torch.float64), 0.0)


BATCHES = [[(1, 4), (2, 4)], [(4, 8), (4, 4), (0, 4)], [(3, 4)], [(4, 4), (1, 4)], [(1, 8), (4, 4)]]


def test_ha_dw_moves_its_anchor_once_a_batch_by_the_pass_rate_of_all_of_it():
    """The same as one step per batch, of all its rollouts; within a batch nothing moves."""
    several, one = build("ha_dw", every="batch", window=2), build("ha_dw", window=2)
    for updates in BATCHES:
        several.begin_batch()
        inside = several._anchor
        for right, rollouts in updates:
            several.learn(stats(right, rollouts))
            assert several._anchor == inside
        one.begin_batch()
        one.learn(stats(*(sum(column) for column in zip(*updates, strict=True))))
    several.begin_batch()
    assert several._anchor == pytest.approx(one._anchor, rel=1e-14)
    assert several._anchors == pytest.approx(one._anchors, rel=1e-14)
    each = build("ha_dw", window=2)
    for right, rollouts in (update for updates in BATCHES for update in updates):
        each.begin_batch()
        each.learn(stats(right, rollouts))
    assert each._anchor != pytest.approx(one._anchor, rel=1e-3)


def test_ha_dw_saved_inside_a_batch_goes_on_bit_for_bit():
    whole, saved, resumed = (build("ha_dw", every="batch", window=2) for _ in range(3))
    for algorithm in (whole, saved):
        for right, rollouts in BATCHES[0]:
            algorithm.begin_batch() if right == 1 else None
            algorithm.learn(stats(right, rollouts))
    resumed.load_state_dict(saved.state_dict())
    for algorithm in (whole, resumed):
        algorithm.learn(stats(3, 4))
        algorithm.begin_batch()
    assert resumed.state_dict() == whole.state_dict()
    assert whole._anchor == pytest.approx((1 + 2 + 3) / 12)
    for torn in ([[0.5]], [[2.0, 4.0]], [[0.5, 0.0]], "x", [[0.5, True]]):
        with pytest.raises(CheckpointError, match="algorithm state, pending"):
            resumed.load_state_dict({**whole.state_dict(), "pending": torn})
    with pytest.raises(AlgorithmError, match="every: got 'epoch', allowed are step, batch"):
        build("ha_dw", every="epoch")


def test_a_state_of_before_there_were_batches_still_loads():
    old = {"algorithm": "ha_dw", "anchor": 0.5, "anchors": [0.25, 0.5], "early": []}
    algorithm = build("ha_dw", every="batch", window=2)
    algorithm.load_state_dict(old)
    assert algorithm.state_dict() == old


def test_reinforce_has_the_gradient_of_the_logprob_at_every_ratio():
    logprobs = torch.tensor([-1.0, -3.0, -0.2], dtype=torch.float64, requires_grad=True)
    ratio = (logprobs - torch.tensor([-2.5, -0.5, -0.2], dtype=torch.float64)).exp()
    advantages = torch.tensor([1.5, 1.5, -0.5], dtype=torch.float64)
    losses = reinforce_loss(ratio, advantages)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx((-advantages).tolist(), rel=1e-15)
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist(), rel=1e-15)
    with pytest.raises(AlgorithmError, match=r"dual_clip: got 3\.0 with trust_region 'reinforce'"):
        ObjectiveSettings(trust_region="reinforce", dual_clip=3.0)


def dapo_masses(lengths_GK, denominator):
    """Each prompt's share of the coefficients of all tokens; all prompts have right and wrong answers."""
    lengths_N = torch.tensor([n for group in lengths_GK for n in group])
    bins_N = torch.ones(len(lengths_N), dtype=torch.int64)
    groups_NK = torch.tensor(lengths_GK).repeat_interleave(K, dim=0)
    algorithm = build("dapo", denominator=denominator)
    assert algorithm.needs_group_lengths == (denominator == "prompt")
    samples = Samples(bins_N, lengths_N, torch.ones(len(lengths_N)), groups_NK)
    mass_N = algorithm.coefficients(samples, BatchTotals.of(bins_N, lengths_N, K)) * lengths_N
    return mass_N.reshape(-1, K).sum(dim=1).tolist()


def test_dapos_denominator_is_of_the_batch_or_of_each_prompt():
    lengths = [[1, 2, 3, 4], [10, 20, 30, 40], [90, 100, 0, 0]]
    assert dapo_masses(lengths, "batch") == pytest.approx([10 / 300, 100 / 300, 190 / 300], rel=1e-15)
    assert dapo_masses(lengths, "prompt") == pytest.approx([1 / 3] * 3, rel=1e-15)
    assert dapo_masses([[5, 5, 5, 5], [0, 0, 0, 0]], "prompt") == pytest.approx([1 / 2, 0.0], rel=1e-15)
    with pytest.raises(AlgorithmError, match="denominator: got 'rollout', allowed are batch, prompt"):
        build("dapo", denominator="rollout")
    nothing, alone = torch.tensor([1]), Samples(torch.tensor([1]), torch.tensor([3]), torch.ones(1))
    with pytest.raises(AlgorithmError, match="no group_lengths_NK"):
        build("dapo", denominator="prompt").coefficients(alone, BatchTotals.of(nothing, nothing, K))
    with pytest.raises(AlgorithmError, match="call `coefficients` with Samples"):
        build("dapo", denominator="prompt").sample_coefficients(nothing, nothing, BatchTotals.of(nothing, nothing, K))
