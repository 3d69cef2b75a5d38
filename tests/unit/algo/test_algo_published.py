"""What papers print and the default is not: each option against the printed formula, in plain loops over floats."""

from __future__ import annotations

import math

import algo_reference as reference
import pytest
import torch

from megatron_daro.algo.advantages import length_rewards
from megatron_daro.algo.algorithm import Samples, StepStats, StepTotals
from megatron_daro.algo.objective import ObjectiveSettings, reinforce_loss, token_objective
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
    totals = StepTotals.of(bins_N, lengths_N, K)
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
    with pytest.raises(AlgorithmError, match="deviation: got 'mean'"):
        build("dgpo", deviation="mean")


def test_equal_rewards_have_no_deviation_and_no_advantage():
    ids_N, rewards_N = torch.tensor([3, 3, 3, 3]), torch.tensor([0.1, 0.1, 0.1, 0.1])
    assert build("dgpo", deviation="rewards").advantages(rewards_N, ids_N).tolist() == [0.0] * 4


def stats(right, rollouts):
    per_bin = torch.zeros(K + 1, dtype=torch.int64)
    per_bin[K], per_bin[0] = right, rollouts - right
    totals = StepTotals(torch.ones(K + 1, 1, dtype=torch.int64), per_bin)
    return StepStats(totals, {}, 0.0)


BATCHES = [[(1, 4), (2, 4)], [(4, 8), (4, 4), (0, 4)], [(3, 4)], [(4, 4), (1, 4)], [(1, 8), (4, 4)]]


def test_ha_dw_moves_its_anchor_once_a_batch_by_the_pass_rate_of_all_of_it():
    """The same as one step per batch, of all its rollouts; within a batch nothing moves."""
    several, one = build("ha_dw", every="batch", window=2), build("ha_dw", window=2)
    for updates in BATCHES:
        several.begin_batch()
        inside = several.state_dict()["anchor"]
        for right, rollouts in updates:
            several.learn(stats(right, rollouts))
            assert several.state_dict()["anchor"] == inside
        one.begin_batch()
        one.learn(stats(*(sum(column) for column in zip(*updates, strict=True))))
    several.begin_batch()
    together, apart = one.state_dict(), several.state_dict()
    assert apart["anchor"] == pytest.approx(together["anchor"], rel=1e-14)
    assert apart["anchors"] == pytest.approx(together["anchors"], rel=1e-14)
    each = build("ha_dw", window=2)
    for right, rollouts in (update for updates in BATCHES for update in updates):
        each.begin_batch()
        each.learn(stats(right, rollouts))
    assert each.state_dict()["anchor"] != pytest.approx(together["anchor"], rel=1e-3)


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
    assert whole.state_dict()["anchor"] == pytest.approx((1 + 2 + 3) / 12)
    for torn in ([[0.5]], [[2.0, 4.0]], [[0.5, 0.0]], "x", [[0.5, True]]):
        with pytest.raises(CheckpointError, match="pending"):
            resumed.load_state_dict({**whole.state_dict(), "pending": torn})
    with pytest.raises(AlgorithmError, match="every: got 'epoch'"):
        build("ha_dw", every="epoch")


def test_reinforce_has_the_gradient_of_the_logprob_at_every_ratio():
    logprobs = torch.tensor([-1.0, -3.0, -0.2], dtype=torch.float64, requires_grad=True)
    ratio = (logprobs - torch.tensor([-2.5, -0.5, -0.2], dtype=torch.float64)).exp()
    advantages = torch.tensor([1.5, 1.5, -0.5], dtype=torch.float64)
    losses = reinforce_loss(ratio, advantages)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx((-advantages).tolist(), rel=1e-15)
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist(), rel=1e-15)
    with pytest.raises(AlgorithmError, match=r"dual_clip: got 3\.0"):
        ObjectiveSettings(trust_region="reinforce", dual_clip=3.0)


def dapo_masses(lengths_GK, denominator):
    """Each prompt's share of the coefficients of all tokens; all prompts have right and wrong answers."""
    lengths_N = torch.tensor([n for group in lengths_GK for n in group])
    bins_N = torch.ones(len(lengths_N), dtype=torch.int64)
    groups_NK = torch.tensor(lengths_GK).repeat_interleave(K, dim=0)
    algorithm = build("dapo", denominator=denominator)
    assert algorithm.needs_group_lengths == (denominator == "prompt")
    samples = Samples(bins_N, lengths_N, torch.ones(len(lengths_N)), groups_NK)
    mass_N = algorithm.coefficients(samples, StepTotals.of(bins_N, lengths_N, K)) * lengths_N
    return mass_N.reshape(-1, K).sum(dim=1).tolist()


def test_dapos_denominator_is_of_the_batch_or_of_each_prompt():
    lengths = [[1, 2, 3, 4], [10, 20, 30, 40], [90, 100, 0, 0]]
    assert dapo_masses(lengths, "batch") == pytest.approx([10 / 300, 100 / 300, 190 / 300], rel=1e-15)
    assert dapo_masses(lengths, "prompt") == pytest.approx([1 / 3] * 3, rel=1e-15)
    assert dapo_masses([[5, 5, 5, 5], [0, 0, 0, 0]], "prompt") == pytest.approx([1 / 2, 0.0], rel=1e-15)
    with pytest.raises(AlgorithmError, match="denominator: got 'rollout'"):
        build("dapo", denominator="rollout")
    nothing, alone = torch.tensor([1]), Samples(torch.tensor([1]), torch.tensor([3]), torch.ones(1))
    with pytest.raises(AlgorithmError, match="group_lengths_NK"):
        build("dapo", denominator="prompt").coefficients(alone, StepTotals.of(nothing, nothing, K))
    with pytest.raises(AlgorithmError, match="`coefficients`"):
        build("dapo", denominator="prompt").bin_coefficients(nothing, nothing, StepTotals.of(nothing, nothing, K))


def kimi_case():
    """Three answers of two, three and one tokens; the second token of the second is not trained."""
    generator = torch.Generator().manual_seed(4)
    logprobs_T = -torch.rand(6, generator=generator, dtype=torch.float64) * 2
    old_T = logprobs_T + 0.4 * torch.randn(6, generator=generator, dtype=torch.float64)
    mask_T = torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    return logprobs_T, old_T, mask_T, torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0.5, -0.25, -0.25]).double()


def test_kimis_gradient_is_that_of_the_squared_surrogate():
    """1 / k sum over answers of (r - mean r - tau log pi / pi_i)^2 / (2 tau), by autograd through the square."""
    logprobs_T, old_T, mask_T, sample_T, advantages_M = kimi_case()
    tau, printed = 0.7, logprobs_T.clone().requires_grad_()
    squares = []
    for m in range(3):
        own = (sample_T == m) & mask_T
        squares.append((advantages_M[m] - tau * (printed[own] - old_T[own]).sum()) ** 2)
    (sum(squares) / 3 / (2 * tau)).backward()
    algorithm, ours = build("kimi", tau=tau), logprobs_T.clone().requires_grad_()
    lengths_M, bins_M = torch.tensor([2, 2, 1]), torch.tensor([1, 1, 1])
    objective = token_objective(
        ours,
        None,
        old_logprobs_T=old_T,
        rollout_logprobs_T=None,
        ref_logprobs_T=None,
        advantages_T=advantages_M[sample_T],
        mask_T=mask_T,
        sample_T=sample_T,
        num_samples=3,
        settings=ObjectiveSettings(trust_region="mirror", mirror_tau=tau),
    )
    coefficients_M = algorithm.bin_coefficients(bins_M, lengths_M, StepTotals.of(bins_M, lengths_M, K))
    (coefficients_M * objective.sample_losses_M).sum().backward()
    assert ours.grad.tolist() == pytest.approx(printed.grad.tolist(), rel=1e-12, abs=1e-16)
    assert algorithm.advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4)).tolist() == [0.75, -0.25, -0.25, -0.25]
    for tau in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(AlgorithmError, match="tau: got"):
            build("kimi", tau=tau)
        with pytest.raises(AlgorithmError, match="mirror_tau: got"):
            ObjectiveSettings(mirror_tau=tau)


def printed_length_reward(lengths, right, i):
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return 0.0
    value = 0.5 - (lengths[i] - shortest) / (longest - shortest)
    return value if right[i] else min(0.0, value)


def test_kimis_length_reward_is_as_printed():
    groups = {7: ([10, 20, 15, 30], [1, 0, 1, 0]), -2: ([5, 5, 5, 5], [1, 0, 1, 0]), 3: ([1, 0, 9, 2], [0, 0, 1, 1])}
    rows = [(n, c, g) for g, (lengths, right) in groups.items() for n, c in zip(lengths, right, strict=True)]
    rows = rows[::2] + rows[1::2]
    lengths_N, correct_N, ids_N = (torch.tensor(column) for column in zip(*rows, strict=True))
    want = {
        (g, n, c): printed_length_reward(*groups[g], i)
        for g in groups
        for i, (n, c) in enumerate(zip(*groups[g], strict=True))
    }
    got = length_rewards(lengths_N, correct_N, ids_N).tolist()
    assert got == pytest.approx([want[g, n, c] for n, c, g in rows], rel=1e-7)
    assert length_rewards(lengths_N.numpy(), correct_N.numpy(), ids_N.numpy()).tolist() == got
    assert max(got) == 0.5 and min(got) == -0.5
