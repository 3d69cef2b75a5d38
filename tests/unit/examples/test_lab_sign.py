"""DARO with weights that see the sign: where they come to rest, and the run that hands gradients over."""

from __future__ import annotations

import dataclasses
import json
import math

import closed_run
import pytest
import torch
from closed_world import Dials
from sign_weights import DaroSign, DaroTaught, best_weights

from megatron_daro.algo.algorithm import BatchTotals, Samples, StepStats
from megatron_daro.algo.difficulty import bin_sums
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError

K = 4
SIZES = {"rollouts_per_prompt": K, "max_response_tokens": 64}
BINS = torch.tensor([1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [0] * 4)
RIGHT = torch.tensor([1, 0, 0, 0] + [1, 1, 0, 0] + [1, 1, 1, 0] + [1] * 4 + [0] * 4).bool()
LENGTHS = torch.where(RIGHT, 10, 15)
SMALL = Dials(groups=8, rollouts=4, steps=6, problems=40, held_out=30)


def step_of(algorithm):
    """(samples, totals, evidence) of an on-policy step with a group in each bin."""
    groups = torch.arange(5).repeat_interleave(K)
    advantages = algorithm.advantages(RIGHT.double(), groups)
    totals = BatchTotals.of(BINS, LENGTHS, K)
    losses = -advantages * LENGTHS
    sums = {"loss_sums": losses, "abs_loss_sums": losses.abs()}
    evidence = {name: bin_sums(values, BINS, K)[:, None] for name, values in sums.items()}
    return Samples(BINS, LENGTHS, advantages), totals, StepStats(totals, evidence, torch.zeros(0), 0.0)


def test_magnitudes_teach_the_ratio_of_lengths_and_undo_the_token_means_bias():
    """At rest w+ = (mu l+ + (1 - mu) l-) / (s l+), w- the same with l- below, and a bin's signed loss is 0."""
    algorithm = DaroSign(half_life=0.5, **SIZES)
    samples, totals, stats = step_of(algorithm)
    for _ in range(60):
        algorithm.learn(stats)
    mu = torch.tensor([1, 2, 3]).double() / K
    mean, s = mu * 10 + (1 - mu) * 15, (mu * (1 - mu)).sqrt()
    want = torch.stack([mean / (s * 15), mean / (s * 10)], dim=1)
    torch.testing.assert_close(algorithm.sign_weights[1:-1], want, rtol=1e-5, atol=0)
    pulls = bin_sums(algorithm.coefficients(samples, totals) * samples.advantages_N * LENGTHS, BINS, K)
    assert pulls.abs().max() < 1e-6
    assert algorithm.clamped == 0 and algorithm.sign_weights[[0, -1]].eq(1).all()


def test_a_step_pays_each_verdict_its_weight_over_one_denominator():
    algorithm = DaroSign(**SIZES)
    samples, totals, stats = step_of(algorithm)
    kept = int(LENGTHS[:12].sum())
    torch.testing.assert_close(algorithm.coefficients(samples, totals)[:12], torch.full((12,), 1 / kept).double())
    algorithm.learn(stats)
    got = algorithm.coefficients(samples, totals)
    for i in range(20):
        k, verdict = int(BINS[i]), int(RIGHT[i])
        want = float(algorithm.sign_weights[k, verdict]) / kept if 0 < k < K else 0.0
        assert got[i] == pytest.approx(want, rel=1e-12)


def test_averages_outlive_an_absent_bin_and_a_saved_state():
    algorithm, other = DaroSign(**SIZES), DaroSign(**SIZES)
    _, totals, stats = step_of(algorithm)
    algorithm.learn(stats)
    before = algorithm.sign_weights
    gone = {name: values * 0 for name, values in stats.sums.items()}
    tokens = torch.zeros_like(totals.tokens_per_cell)
    algorithm.learn(StepStats(BatchTotals(tokens, totals.rollouts_per_bin), gone, torch.zeros(0), 0.0))
    assert torch.equal(before, algorithm.sign_weights), "a step without trained groups teaches nothing"
    other.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert torch.equal(other.sign_weights, before)
    with pytest.raises(CheckpointError, match="losses"):
        other.load_state_dict({**algorithm.state_dict(), "losses": [1.0]})
    bad = {**stats.sums, "loss_sums": stats.sums["loss_sums"] * math.nan}
    with pytest.raises(NonFiniteError):
        algorithm.learn(dataclasses.replace(stats, sums=bad))


def test_gradients_teach_worth_over_noise():
    """Orthogonal cells, a weak barrier: w_c is proportional to x_c . v / |x_c|^2; a strong barrier: DAPO."""
    products, progress = torch.diag(torch.tensor([1.0, 4.0, 2.0])).double(), torch.tensor([1.0, 1.0, 3.0]).double()
    start = torch.ones(3, dtype=torch.float64)
    got = best_weights(products, progress, 1e-9, start)
    ratio = progress / products.diagonal()
    torch.testing.assert_close(got / got[0], ratio / ratio[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(best_weights(products, progress, 1e9, start), start, rtol=1e-6, atol=0)
    assert torch.equal(best_weights(products, -progress, 0.1, start), start), "nothing to learn from"


def test_the_weights_are_a_minimum_of_the_sum_with_its_barrier():
    torch.manual_seed(0)
    gradients = torch.randn(6, 9, dtype=torch.float64)
    products, progress = gradients @ gradients.T, gradients @ gradients.sum(0) + 1
    weights = best_weights(products, progress, 0.05, torch.ones(6).double()).requires_grad_()
    m, g = products * 6 / products.sum(), progress * 6 / progress.sum()
    value = weights @ m @ weights / 2 - weights @ g + 0.05 * (weights - weights.log()).sum()
    (slope,) = torch.autograd.grad(value, weights)
    assert slope.abs().max() < 1e-8 and weights.min() > 0


def test_a_cell_against_the_reward_is_paid_little_and_one_step_moves_nothing():
    algorithm = DaroTaught(edges=(), rest_steps=0, half_life=1.0, **SIZES)
    wrong, right = torch.tensor([-1.0, 0.5]).double(), torch.tensor([2.0, 0.0]).double()
    for step in range(8):
        algorithm.learn_from_gradients(torch.stack([wrong, right, torch.tensor([1.0, 0.0]).double()]))
        if not step:
            assert algorithm.sign_weights.eq(1).all()
    assert algorithm.sign_weights[1, 0] < algorithm.sign_weights[1, 1] / 2


def test_a_run_hands_over_gradients_that_add_up_to_the_steps_own(monkeypatch):
    """At weights of 1 the rows of the cells are the policy's gradient; the last is that of the mean reward."""
    run = closed_run.ClosedRun(SMALL, "daro_taught", 0.04, 0)
    seen = []
    monkeypatch.setattr(run.algorithm, "learn_from_gradients", lambda rows: seen.append(rows))
    monkeypatch.setattr(run.algorithm, "learn", lambda stats: None)
    run.one_batch()
    torch.testing.assert_close(seen[0][:-1].sum(0), gradient_of(run), rtol=1e-10, atol=1e-15)
    assert len(seen) == 1 and len(seen[0]) == 7 and seen[0][-1].abs().sum() > 0


def gradient_of(run):
    return torch.cat([parameter.grad.flatten() for parameter in run.policy.parameters])


def test_without_gradients_it_is_refused():
    algorithm = DaroTaught(**SIZES)
    with pytest.raises(AlgorithmError, match="daro_taught"):
        algorithm.learn(step_of(algorithm)[2])
    with pytest.raises(AlgorithmError):
        algorithm.state_dict()


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        (DaroSign, {"half_life": 0.0}),
        (DaroSign, {"clamp": (2.0, 3.0)}),
        (DaroTaught, {"edges": (0.5, 0.5)}),
        (DaroTaught, {"strength": 0.0}),
        (DaroTaught, {"rest_steps": -1}),
    ],
)
def test_options_out_of_range_are_refused(cls, option):
    with pytest.raises(AlgorithmError, match=next(iter(option))):
        cls(**SIZES, **option)


def test_a_verdict_adds_one_dimension_to_what_a_step_is_expected_to_do():
    """The expected pull of a prompt with pass rate q is f(q) grad q; f of each bin's weight, and of each cell's."""
    size, q = 8, torch.linspace(0.02, 0.98, 97, dtype=torch.float64)[:, None]
    k = torch.arange(1, size).double()
    chance = torch.distributions.Binomial(size, q).log_prob(k).exp() * (k / size * (1 - k / size)).sqrt()
    of_right, of_wrong = chance / q, chance / (1 - q)
    assert torch.linalg.matrix_rank(of_right + of_wrong, rtol=1e-9) == size - 1
    assert torch.linalg.matrix_rank(torch.cat([of_right, of_wrong], dim=1), rtol=1e-9) == size
    gap = k / size - 0.5
    of_ha_dw = of_right @ (-gap).exp() + of_wrong @ gap.exp()
    per_bin = torch.linalg.lstsq(of_right + of_wrong, of_ha_dw[:, None]).solution[:, 0]
    torch.testing.assert_close((of_right + of_wrong) @ per_bin, of_ha_dw, rtol=1e-10, atol=0)
    assert [round(w, 2) for w in per_bin.tolist()] == [1.45, 1.12, 0.98, 0.92, 0.98, 1.12, 1.45]
