"""More of DARO's weights: measures, kernels over the pass rate, averages, lengths; and where each comes to rest."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_daro.algo.algorithm import BatchTotals, StepStats, length_classes
from megatron_daro.algo.difficulty_weights import DifficultyWeights, gaussian_basis
from megatron_daro.algo.objective import ObjectiveSettings, token_objective
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import AlgorithmError, CheckpointError

K = 8
COUNTS = torch.tensor([30, 400, 300, 0, 200, 90, 250, 100, 60])
MEASURES = torch.tensor([9.0, 0.9, 0.5, 9.0, 0.4, 0.45, 0.6, 1.3, 9.0], dtype=torch.float64)
"""What is measured of each bin; 0, 3 and 8 take no part."""
PRESENT = [1, 2, 4, 5, 6, 7]


def sums_of(magnitude):
    """Constant sums of a step under which every present bin k measures MEASURES[k]."""
    signs = torch.tensor([(-1.0) ** k for k in range(K + 1)], dtype=torch.float64)
    wanted = MEASURES * COUNTS
    sums = {"loss_sums": (signs if magnitude == "abs" else 1.0) * wanted, "token_counts": COUNTS}
    if magnitude == "token":
        sums |= {"loss_sums": torch.zeros(K + 1), "abs_loss_sums": wanted}
    if magnitude == "advantage":
        sums |= {"loss_sums": torch.zeros(K + 1), "advantage_sums": wanted}
    if magnitude == "gradient":
        sums |= {"loss_sums": torch.zeros(K + 1), "gradient_squares": wanted.square()}
    return sums


def iterated(weights, sums, steps=6000):
    for _ in range(steps):
        weights.update(**sums)
    return weights.weights


def expected_measures(magnitude):
    """m_k: for the gradient's norm relative to the mean of the present bins."""
    return MEASURES / MEASURES[PRESENT].mean() if magnitude == "gradient" else MEASURES


@pytest.mark.parametrize("magnitude", ["abs", "signed", "token", "advantage", "gradient"])
@pytest.mark.parametrize("half_life", [None, 20.0])
def test_every_measure_comes_to_rest_at_its_inverse(magnitude, half_life):
    weights = DifficultyWeights(K, magnitude=magnitude, half_life=half_life, learning_rate=0.003)
    got, want = iterated(weights, sums_of(magnitude)), 1 / expected_measures(magnitude)
    torch.testing.assert_close(got[PRESENT], want[PRESENT], rtol=2e-3 if half_life is None else 1e-9, atol=0)
    assert got[[0, 3, K]].tolist() == [1.0, 1.0, 1.0]
    settled = DifficultyWeights(K, magnitude=magnitude, half_life=half_life)
    settled.settle(**sums_of(magnitude))
    torch.testing.assert_close(settled.weights[PRESENT], want[PRESENT], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("normalizer", "parts"), [("bin", "equal"), ("batch", "equal"), ("shared", "of the tokens")])
def test_at_rest_a_bins_part_of_the_loss_is_equal_or_its_share_of_the_tokens(normalizer, parts):
    weights = DifficultyWeights(K, normalizer=normalizer, clamp=(1e-3, 1e3))
    sums = sums_of("abs")
    weights.settle(**sums)
    found = (weights.coefficients(COUNTS) * sums["loss_sums"].abs())[PRESENT]
    shares = COUNTS[PRESENT] / COUNTS[PRESENT].sum()
    torch.testing.assert_close(found, torch.ones_like(found) if parts == "equal" else shares.double())


def test_after_one_half_life_an_average_has_come_half_way():
    weights = DifficultyWeights(K, half_life=5.0)
    iterated(weights, sums_of("abs"), steps=5)
    torch.testing.assert_close(1 / weights.weights[PRESENT], (1 + MEASURES[PRESENT]) / 2, rtol=1e-12, atol=0)


def test_the_gradients_norm_is_equal_over_the_bins_at_rest():
    """w_k sqrt(Q_k) / N_k, the estimated norm of a bin's part of the gradient, is the mean of sqrt(Q_k) / N_k."""
    squares = torch.tensor([3.0, 400.0, 90.0, 7.0, 50.0, 10.0, 300.0, 2.0, 5.0], dtype=torch.float64)
    weights = DifficultyWeights(K, magnitude="gradient", clamp=(0.01, 100.0))
    sums = {"loss_sums": torch.zeros(K + 1), "token_counts": COUNTS, "gradient_squares": squares}
    weights.settle(**sums)
    norms = squares.sqrt() / COUNTS
    of_bins = weights.coefficients(COUNTS) * squares.sqrt()
    torch.testing.assert_close(of_bins[PRESENT], norms[PRESENT].mean().expand(len(PRESENT)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kernels", [2, 4, 7])
def test_kernels_come_to_rest_where_the_mean_within_each_is_one(kernels):
    """Sum over present bins of phi_j (w_k m_k - 1) = 0 for every kernel j: the derivative of the convex sum."""
    weights = DifficultyWeights(K, kernels=kernels, learning_rate=0.003, magnitude="signed")
    got = iterated(weights, sums_of("signed"))
    basis = gaussian_basis(K, kernels)[:, PRESENT]
    inside = basis.sum(dim=1) >= 0.1
    rest = basis @ (got * MEASURES - 1)[PRESENT]
    assert rest[inside].abs().max() < 5e-3
    settled = DifficultyWeights(K, kernels=kernels, magnitude="signed")
    settled.settle(**sums_of("signed"))
    assert (basis @ (settled.weights * MEASURES - 1)[PRESENT])[inside].abs().max() < 1e-9
    torch.testing.assert_close(got[PRESENT], settled.weights[PRESENT], rtol=1e-2, atol=0)


def test_kernels_reach_weights_that_lie_in_their_span_and_cover_absent_bins():
    basis = gaussian_basis(K, 3)
    wanted = (torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64) @ basis).exp()
    weights = DifficultyWeights(K, kernels=3, magnitude="signed")
    weights.settle(1 / wanted * COUNTS, COUNTS)
    torch.testing.assert_close(weights.weights[1:-1], wanted[1:-1], rtol=1e-8, atol=0)  # bin 3 was never seen


def test_averages_over_kernels_come_to_rest_at_the_mean_measure_within_each():
    weights = DifficultyWeights(K, kernels=3, half_life=4.0)
    got = iterated(weights, sums_of("abs"), steps=400)
    basis = gaussian_basis(K, 3)
    means = (basis[:, PRESENT] @ MEASURES[PRESENT]) / basis[:, PRESENT].sum(dim=1)
    torch.testing.assert_close(got[1:-1], (1 / (means @ basis))[1:-1], rtol=1e-9, atol=0)


def test_the_bumps_sum_to_one_at_every_pass_rate():
    basis = gaussian_basis(K, 5, 2)
    assert basis.shape == (10, (K + 1) * 2)
    inner = torch.ones((K + 1) * 2, dtype=torch.float64)
    inner[:2] = inner[-2:] = 0.0
    torch.testing.assert_close(basis.sum(dim=0), inner, rtol=1e-14, atol=0)
    assert not (basis[0::2, 1::2].any() or basis[1::2, 0::2].any()), "classes of lengths are apart"


def test_kernels_learn_each_class_of_lengths_by_itself():
    weights = DifficultyWeights(K, kernels=3, length_classes=2, magnitude="signed", half_life=1.0)
    counts = COUNTS.repeat_interleave(2)
    measures = MEASURES.repeat_interleave(2) * torch.tensor([1.0, 0.5], dtype=torch.float64).repeat(K + 1)
    for _ in range(200):
        weights.update(measures * counts, counts)
    short, long = weights.weights.reshape(K + 1, 2).unbind(dim=1)
    torch.testing.assert_close(long[1:-1], 2 * short[1:-1], rtol=1e-9, atol=0)


def daro(**options):
    return make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=64, **options)


BINS_N = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3, 0, 4])
LENGTHS_N = torch.tensor([2, 10, 9, 4, 30, 3, 10, 0, 5, 50])
EDGES = (10, 20)


def test_coefficients_by_pass_rate_and_length_by_hand():
    algorithm = daro(length_edges=EDGES)
    totals = BatchTotals.of(BINS_N, LENGTHS_N, 4, EDGES)
    assert totals.tokens_per_cell.tolist() == [[5, 0, 0], [15, 10, 0], [0, 0, 0], [3, 10, 30], [0, 0, 50]]
    assert totals.tokens_per_bin.tolist() == [5, 25, 0, 43, 50]
    back = BatchTotals.from_vector(totals.vector().double(), 3)
    assert torch.equal(back.tokens_per_cell, totals.tokens_per_cell) and back.num_rollouts == 10
    got = algorithm.sample_coefficients(BINS_N, LENGTHS_N, totals)
    want = [1 / 15, 1 / 10, 1 / 15, 1 / 15, 1 / 30, 1 / 3, 1 / 10, 0, 0, 0]
    assert got.tolist() == pytest.approx(want, rel=1e-15)
    assert length_classes(LENGTHS_N, ()).tolist() == [0] * 10


def test_each_cell_comes_to_rest_at_its_own_inverse_and_only_where_it_has_tokens():
    algorithm = daro(length_edges=EDGES, learning_rate=0.003)
    totals = BatchTotals.of(BINS_N, LENGTHS_N, 4, EDGES)
    measures = torch.linspace(0.4, 2.0, 15, dtype=torch.float64).reshape(5, 3)
    step_stats = StepStats(totals, {"loss_sums": measures * totals.tokens_per_cell}, torch.zeros(0), 0.0)
    for _ in range(5000):
        algorithm.learn(step_stats)
    present = totals.tokens_per_cell > 0
    present[0] = present[-1] = False
    weights = algorithm.cell_weights
    torch.testing.assert_close(weights[present], 1 / measures[present], rtol=2e-3, atol=0)
    assert (weights[~present] == 1).all()
    torch.testing.assert_close(algorithm.weights, weights.mean(dim=1))


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": 3},
        {"half_life": 7.0},
        {"kernels": 2, "half_life": 7.0, "length_edges": EDGES},
        {"length_edges": EDGES, "magnitude": "advantage"},
        {"magnitude": "gradient"},
    ],
    ids=str,
)
def test_states_continue_over_json_bit_for_bit_and_other_forms_are_refused(options):
    whole, first = daro(**options), daro(**options)
    totals = BatchTotals.of(BINS_N, LENGTHS_N, 4, tuple(options.get("length_edges", ())))

    def learn(algorithm, step):
        names = ("loss_sums", "abs_loss_sums", "advantage_sums", "gradient_squares")
        sums = {name: (step + 1.5 + i) * totals.tokens_per_cell.double() for i, name in enumerate(names)}
        algorithm.learn(StepStats(totals, sums, torch.zeros(0), 0.0))

    for step in range(3):
        learn(whole, step)
        learn(first, step)
    second = daro(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(3, 6):
        learn(whole, step)
        learn(second, step)
    assert second.state_dict() == whole.state_dict() != first.state_dict()
    if set(options) != {"magnitude"}:
        with pytest.raises(CheckpointError, match="|".join(("kernels", "averages", "length_edges"))):
            daro().load_state_dict(whole.state_dict())
        with pytest.raises(CheckpointError, match="|".join(("kernels", "averages", "length_edges"))):
            daro(**options).load_state_dict(daro().state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": 4}, "kernels: got 4, allowed is 2 to 3"),
        ({"kernels": 1}, "kernels: got 1"),
        ({"half_life": 0.0}, "half_life: got 0.0"),
        ({"half_life": math.inf}, "half_life"),
        ({"parameter": "linear", "kernels": 2}, "parameter: got 'linear' with kernels"),
        ({"parameter": "linear", "half_life": 2.0}, "parameter: got 'linear' with half_life"),
        ({"length_edges": (5, 5)}, "length_edges"),
        ({"length_edges": (0,)}, "length_edges"),
        ({"length_edges": (9, 5)}, "length_edges"),
        ({"magnitude": "norm"}, "magnitude: got 'norm', allowed are abs, signed, token, advantage, gradient"),
    ],
)
def test_forms_without_a_meaning_are_refused(options, said):
    with pytest.raises(AlgorithmError, match=said):
        daro(**options)


@pytest.mark.parametrize(("magnitude", "missing"), [("advantage", "advantage_sums"), ("gradient", "gradient_squares")])
def test_a_measure_without_its_sums_is_refused(magnitude, missing):
    with pytest.raises(AlgorithmError, match=f"{missing}: got None"):
        DifficultyWeights(K, magnitude=magnitude).update(torch.ones(K + 1), COUNTS)


@pytest.mark.parametrize(
    "settings",
    [
        ObjectiveSettings(),
        ObjectiveSettings(trust_region="gspo", clip_low=0.05, clip_high=0.05),
        ObjectiveSettings(trust_region="cispo"),
        ObjectiveSettings(trust_region="sapo"),
        ObjectiveSettings(correction="tis", correction_cap=1.1),
    ],
    ids=["clip", "gspo", "cispo", "sapo", "tis"],
)
def test_squares_and_masses_per_sample_are_those_of_the_gradient_itself(settings):
    """The squares are what autograd finds from outside, token by token; the masses |A| times the trained tokens."""
    generator = torch.Generator().manual_seed(3)
    logprobs_T = (torch.randn(30, generator=generator, dtype=torch.float64) - 2).requires_grad_()
    old_T = logprobs_T.detach() + 0.3 * torch.randn(30, generator=generator, dtype=torch.float64)
    segment_T, mask_T = torch.arange(30) // 10, torch.rand(30, generator=generator) < 0.8
    advantages_M = torch.tensor([1.2, -0.7, 0.3], dtype=torch.float64)
    result = token_objective(
        logprobs_T,
        None,
        old_logprobs_T=old_T,
        rollout_logprobs_T=old_T + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64),
        ref_logprobs_T=None,
        advantages_T=advantages_M[segment_T],
        mask_T=mask_T,
        segment_T=segment_T,
        num_segments=3,
        settings=settings,
        gradient_squares=True,
    )
    result.segment_losses_M.sum().backward()
    squares = torch.stack([logprobs_T.grad[segment_T == m].square().sum() for m in range(3)])
    torch.testing.assert_close(result.segment_sums_M["gradient_squares"], squares, rtol=1e-12, atol=1e-14)
    trained = torch.stack([mask_T[segment_T == m].sum() for m in range(3)])
    torch.testing.assert_close(
        result.segment_sums_M["advantage_sums"], advantages_M.abs() * trained, rtol=1e-12, atol=0
    )
